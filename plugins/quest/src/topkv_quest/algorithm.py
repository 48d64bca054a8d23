"""Quest: a unit is worth the largest logit that any of its keys could reach.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024,
arXiv 2406.10774. Differences from its code: selection per kv-head (or shared) by the mean of the
query heads' softmaxed scores, kept as its logarithm, instead of per query head; the open unit is
always attended and never scored; the first units are forced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.ops.topk import topk
from topkv.types import AlgorithmSpec, GroupShape, LayerView, ModelShape, RepresentationSpec
from topkv_quest import reference

METADATA = ("bf16", "int8")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Quest:
    """Selects the closed units of the highest mean softmaxed bound.

    Per unit and kv-head it keeps the channel-wise minimum m and maximum M of the keys. A query
    head scores a unit with ``sum_i max(q_i m_i, q_i M_i)``, an upper bound of q·k for every key
    k in it. With these scores times ``model.scale`` as s, a unit u is worth
    ``log sum_g exp(s_gu - lse_g)`` over the query heads g of the lane, in fp32; ``lse_g`` is the
    log-sum-exp of the head over the closed units. That is the order of the mean softmax. In a lane
    of one query head a unit is worth s. The first ``sink_units`` units are forced.

    Metadata is rounded outward, so that the bound holds for it too, up to the rounding of
    fp32 sums. ``"bf16"`` keeps the model's own 16-bit dtype, where minima and maxima are exact,
    and bfloat16 for fp32 models. ``"int8"`` keeps integers times one bfloat16 scale per unit and
    head, the smallest s with ``127 s >= max |k|``. Both are pure functions of the keys of
    the unit: updated token by token or built at once, the bits are the same.

    Of equal scores the lower unit wins. Keys are finite, and below the largest bfloat16 in
    magnitude.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        params: dict[str, Any],
        impl: str,
        device: torch.device,
    ) -> None:
        _validate(model, group, params, impl)
        self.model, self.group = model, group
        self.sink_units: int = params["sink_units"]
        self.metadata_dtype = _metadata_dtype(model.dtype, params["metadata"])
        self.launcher = None
        if impl == "triton":
            from topkv_quest.launch import Launcher

            self.launcher = Launcher(model, group, self.metadata_dtype, device)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        pools = [RepresentationSpec("bounds", "unit", (heads, 2, dim), self.metadata_dtype)]
        if self.metadata_dtype is torch.int8:
            pools.append(RepresentationSpec("scale", "unit", (heads,), torch.bfloat16))
        return AlgorithmSpec(representations=tuple(pools))

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        if self.launcher is not None:
            self.launcher.construct(layer, slot, start, k)
            return
        unit = self.group.unit
        tokens, count = k.shape[0], -(-k.shape[0] // unit)
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, count * unit - tokens))
        valid = torch.arange(count * unit, device=k.device).view(count, unit) < tokens
        units = start // unit + torch.arange(count, device=k.device)
        self._write(
            layer, torch.full_like(units, slot), units, padded.unflatten(0, (-1, unit)), valid
        )

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: object
    ) -> None:
        """Nothing: the bounds are complete at every moment."""

    @hookimpl
    def update(self, layer: LayerView, k: Tensor) -> None:
        if self.launcher is not None:
            self.launcher.update(layer)
            return
        step, unit = layer.step, self.group.unit
        rows = (step.slots >= 0) & (step.lengths > 0) & (step.appended != 0)
        slots, newest = step.slots[rows].long(), step.lengths[rows].long() - 1
        keys = layer.ring_k[slots, :, newest // unit % self.group.ring_slots]
        valid = torch.arange(unit, device=newest.device) <= (newest % unit)[:, None]
        self._write(layer, slots, newest // unit, keys.flatten(1, 2).transpose(1, 2), valid)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, native: Tensor | None, ids: Tensor
    ) -> None:
        if q.shape[1] != 1:
            raise ValueError(f"quest: expected one query per row, got q {list(q.shape)}")
        q = q[:, 0] if q.stride(-1) == 1 else q[:, 0].contiguous()
        if self.launcher is not None:
            scores, closed = self.launcher.score(layer, q, self.sink_units)
            topk(scores, closed, ids, impl="triton", work=self.launcher.work)
            return
        scores, closed = self._score(layer, q)
        topk(scores, closed, ids, impl="reference")

    def _write(
        self, layer: LayerView, slots: Tensor, units: Tensor, keys: Tensor, valid: Tensor
    ) -> None:
        """Bounds of keys ``[n, unit, Hkv, D]`` to the pools."""
        low, high = reference.minmax(keys, valid)
        bounds, scale = reference.encode(low, high, self.metadata_dtype)
        at = reference.host_ids(layer.step.page_table, slots, units, self.group.units_per_page)
        layer.pools["bounds"][at] = bounds
        if scale is not None:
            layer.pools["scale"][at] = scale

    def _score(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        """The reference's scores ``[N, U]`` and closed units ``[N]``."""
        step, group = layer.step, self.group
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        units = torch.arange(group.max_units, device=q.device).expand(step.batch, -1)
        # Behind the closed units stands no page: read page 0, and mask it below.
        units = torch.where(units < closed[:, None], units, 0)
        slots = step.slots.clamp(min=0)[:, None].expand_as(units)
        at = reference.host_ids(step.page_table, slots, units, group.units_per_page)
        scale = layer.pools["scale"][at] if "scale" in layer.pools else None
        raw = reference.head_scores(q, layer.pools["bounds"][at], scale) * self.model.scale
        scores = reference.lane_scores(raw, closed, group.lane_heads, self.sink_units)
        return scores, closed.repeat_interleave(group.lane_heads)


def _metadata_dtype(dtype: torch.dtype, metadata: str) -> torch.dtype:
    if metadata == "int8":
        return torch.int8
    return dtype if dtype.itemsize == 2 else torch.bfloat16


def _validate(model: ModelShape, group: GroupShape, params: dict[str, Any], impl: str) -> None:
    reasons = []
    unknown = sorted(set(params) - {"metadata", "sink_units"})
    if unknown:
        reasons.append(f"unknown parameters {unknown}; quest takes 'metadata' and 'sink_units'")
    if params.get("metadata") not in METADATA:
        reasons.append(f"metadata must be one of {METADATA}, got {params.get('metadata')!r}")
    sinks = params.get("sink_units")
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        reasons.append(f"sink_units must be an integer of 0 or more, got {sinks!r}")
    elif sinks > max(group.select, 1):
        reasons.append(
            f"sink_units = {sinks} exceeds the {group.select} units of a selection; "
            "lower it or raise the budget"
        )
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    if impl not in ("reference", "triton"):
        reasons.append(f"impl must be 'reference' or 'triton', got {impl!r}")
    if reasons:
        raise ConfigError("quest", reasons)
