"""ArkVale: a unit is a box around its keys, and is worth what its best corner is worth.

Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
NeurIPS 2024: the digest "cuboid-mean". Digest and score are the paper's; what is made of them is
as in topkv's Quest: query heads of a lane are averaged after a softmax, the open unit is always
attended and never scored, the first units are forced.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.algorithms import ScoredUnits
from topkv.hooks.algorithm import RepresentationSpec


def digest_of(keys: Tensor, valid: Tensor) -> Tensor:
    """Centre ``c = (m + M) / 2`` and radius ``r = mean |c - k|``, fp32 ``[n, Hkv, 2, D]``.

    Args:
        keys: ``[n, unit, Hkv, D]``; m and M are their minimum and maximum, channel by channel.
        valid: bool ``[n, unit]``; other keys (NaN, say) have no influence.
    """
    valid = valid[:, :, None, None]
    low = torch.where(valid, keys.float(), float("inf")).amin(1)
    high = torch.where(valid, keys.float(), float("-inf")).amax(1)
    centre = (low + high) / 2
    # Summed in float64, where the order of the keys does not show in the result.
    distance = torch.where(valid, (centre[:, None] - keys.float()).abs().double(), 0.0)
    radius = distance.sum(1) / valid.sum(1)
    return torch.stack([centre, radius.float()], dim=2)


def head_scores(q: Tensor, digest: Tensor) -> Tensor:
    """``sum_i max(q_i (c_i - r_i), q_i (c_i + r_i)) = q.c + |q|.r``, fp32 ``[B, H, U]``.

    Args:
        q: ``[B, H, D]``.
        digest: ``[B, U, Hkv, 2, D]``.
    """
    centre, radius = digest.float().unbind(3)
    q = q.float().unflatten(1, (centre.shape[2], -1))
    scores = torch.einsum("bhgd,buhd->bhgu", q, centre)
    scores += torch.einsum("bhgd,buhd->bhgu", q.abs(), radius)
    return scores.flatten(1, 2)


class ArkVale(ScoredUnits):
    """Selects the closed units of the highest mean softmaxed score, kept as its logarithm.

    Of equal scores the lower unit wins. The first ``sink_units`` units are forced. Everything
    but the top-k is plain torch: every shape follows from the configuration, nothing waits for
    the device.
    """

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.group.num_kv_heads, 2, self.group.head_dim)
        return [RepresentationSpec("digest", "unit", shape, self.model.dtype)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"digest": digest_of(keys, valid)}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return head_scores(q, kept["digest"]) * self.model.scale


class ArkValeTriton(ArkVale):
    """The same, whose top-k runs in kernels."""

    impl = "triton"
