"""A unit is worth what its mean key is to the query head that likes it best.

The method is ``_scores`` and ``_write``; the rest is what every algorithm with one representation
per unit does. Shapes: n units or B rows in front, Hkv kv-heads, H query heads, D head dim,
U = ``group.max_units``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.topk import topk
from topkv.types import AlgorithmSpec, LayerView, RepresentationSpec


class MinimalAlgorithm:
    """Selects the closed units of the largest ``max_h q_h . mean(k)``, in fp32.

    The maximum is over the query heads of a lane. The first ``sink_units`` units are forced; of
    equal scores the lower unit wins.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        group, sinks = setup.group, setup.params["sink_units"]
        most = max(group.select, 1)
        if type(sinks) is not int or not 0 <= sinks <= most:
            expected = f"an integer of 0 to {most}, the units of a selection"
            reason = f"sink_units must be {expected}, got {sinks!r}; lower it or raise the budget"
            raise ConfigError("minimal", [reason])
        self.group, self.sinks = group, sinks

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        shape = (self.group.num_kv_heads, self.group.head_dim)
        return AlgorithmSpec((RepresentationSpec("mean", "unit", shape, torch.float32),))

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        unit, tokens = self.group.unit, k.shape[0]
        first = torch.arange(0, tokens, unit, device=k.device)
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, len(first) * unit - tokens))
        units, held = (start + first) // unit, (tokens - first).clamp(max=unit)
        keys = padded.unflatten(0, (len(first), unit))
        self._write(layer, torch.full_like(units, slot), units, keys, held)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, group = layer.step, self.group
        # Picking rows waits for the device; a kernel masks them instead.
        rows = (step.slots >= 0) & (step.appended != 0)
        slots, newest = step.slots[rows].long(), step.lengths[rows].long() - 1
        units, held = newest // group.unit, newest % group.unit + 1
        # From [n, lane_heads, heads_per_lane, unit, D].
        keys = layer.ring_k[slots, :, units % group.ring_slots].flatten(1, 2).transpose(1, 2)
        self._write(layer, slots, units, keys, held)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, ids: Tensor
    ) -> None:
        step, group = layer.step, self.group
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        scores = self._scores(layer, q[:, 0], closed).masked_fill(
            torch.arange(group.max_units, device=q.device) < self.sinks, torch.inf
        )
        topk(scores, closed.repeat_interleave(group.lane_heads), ids, impl="reference")

    def _write(
        self, layer: LayerView, slots: Tensor, units: Tensor, keys: Tensor, held: Tensor
    ) -> None:
        """Means of the first ``held[n]`` keys of each unit, of ``keys [n, unit, Hkv, D]``."""
        valid = torch.arange(keys.shape[1], device=keys.device) < held[:, None]
        # What lies behind them (NaN, say) has no influence.
        total = torch.where(valid[:, :, None, None], keys.float(), 0).sum(1)
        at = self._host_ids(layer, slots, units)
        layer.pools["mean"][at] = total / held[:, None, None]

    def _scores(self, layer: LayerView, q: Tensor, closed: Tensor) -> Tensor:
        """fp32 ``[B * lane_heads, U]`` of queries ``[B, H, D]``; only closed units count."""
        group = self.group
        units = torch.arange(group.max_units, device=q.device).expand(len(q), -1)
        # Behind the closed units stands no page: read that of unit 0, which topk leaves out.
        units = units.where(units < closed[:, None], 0)
        slots = layer.step.slots.clamp(min=0)[:, None].expand_as(units)
        means = layer.pools["mean"][self._host_ids(layer, slots, units)]  # [B, U, Hkv, D]
        grouped = q.float().unflatten(1, (group.num_kv_heads, -1))
        by_head: Tensor = torch.einsum("bhgd,buhd->bhgu", grouped, means).flatten(1, 2)
        scores: Tensor = by_head.unflatten(1, (group.lane_heads, -1)).amax(2)
        return scores.flatten(0, 1)

    def _host_ids(self, layer: LayerView, slots: Tensor, units: Tensor) -> Tensor:
        """Where logical units of request slots lie in the pools, int64."""
        page, within = units // self.group.units_per_page, units % self.group.units_per_page
        pages = layer.step.page_table[slots.long(), page]
        return pages.long() * self.group.units_per_page + within
