"""Quest: a unit is worth the largest logit that any of its keys could reach.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024,
arXiv 2406.10774. Differences from its code: selection per kv-head (or shared) by the mean of the
query heads' softmaxed scores, kept as its logarithm, instead of per query head; the open unit is
always attended and never scored; the first units are forced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.algorithms import ScoredUnits
from topkv.hooks.algorithm import RepresentationSpec
from topkv_quest import reference

METADATA = ("bf16", "int8")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Quest(ScoredUnits):
    """Selects the closed units of the highest mean softmaxed bound.

    Per unit and kv-head it keeps the channel-wise minimum m and maximum M of the keys. A query
    head scores a unit with ``sum_i max(q_i m_i, q_i M_i)``, an upper bound of q·k for every key
    k in it. With these scores times ``model.scale`` as s, a unit u is worth
    ``log sum_g exp(s_gu - lse_g)`` over the query heads g of the lane, in fp32; ``lse_g`` is the
    log-sum-exp of the head over the closed units. That is the order of the mean softmax. In a lane
    of one query head a unit is worth s. The first ``sink_units`` units are forced.

    Of latent attention a key is the row ``[latent | rope]`` of a token, and queries are those that
    were absorbed into that space: the products are the logits of the model, and the bound is one
    for all heads.

    Metadata is rounded outward, so that the bound holds for it too, up to the rounding of
    fp32 sums. ``"bf16"`` keeps the model's own 16-bit dtype, where minima and maxima are exact,
    and bfloat16 for fp32 models. ``"int8"`` keeps integers times one bfloat16 scale per unit and
    head, the smallest s with ``127 s >= max |k|``. Both are pure functions of the keys of
    the unit: updated token by token or built at once, the bits are the same.

    Of equal scores the lower unit wins. Keys are finite, and below the largest bfloat16 in
    magnitude.
    """

    def refusals(self) -> list[str]:
        reasons, metadata = [], self.params["metadata"]
        if metadata not in METADATA:
            reasons.append(f"metadata must be one of {METADATA}, got {metadata!r}")
        if self.model.dtype not in DTYPES:
            reasons.append(f"keys of {self.model.dtype} are not supported, only of {DTYPES}")
        if self.group.dtype is not self.model.dtype:
            reasons.append(
                f"bounds are made of rows of {self.model.dtype}, and they are stored as "
                f"{self.group.dtype}; set kv_format to 'model'"
            )
        return reasons

    @property
    def metadata_dtype(self) -> torch.dtype:
        """Of bounds."""
        if self.params["metadata"] == "int8":
            return torch.int8
        return self.model.dtype if self.model.dtype.itemsize == 2 else torch.bfloat16

    def representations(self) -> list[RepresentationSpec]:
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        pools = [RepresentationSpec("bounds", "unit", (heads, 2, dim), self.metadata_dtype)]
        if self.metadata_dtype is torch.int8:
            pools.append(RepresentationSpec("scale", "unit", (heads,), torch.bfloat16))
        return pools

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        low, high = reference.minmax(keys, valid)
        bounds, scale = reference.encode(low, high, self.metadata_dtype)
        return {"bounds": bounds} if scale is None else {"bounds": bounds, "scale": scale}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        scores = reference.head_scores(q, kept["bounds"], kept.get("scale"))
        return scores * self.model.scale
