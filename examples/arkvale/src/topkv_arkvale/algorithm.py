"""ArkVale: a unit is a box around its keys, and is worth what its best corner is worth.

Chen et al., "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction",
NeurIPS 2024: the digest "cuboid-mean". Digest and score are the paper's; what is made of them is
as in topkv's Quest: query heads of a lane are averaged after a softmax, the open unit is always
attended and never scored, the first units are forced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.ops.topk import topk, workspace
from topkv.types import AlgorithmSpec, GroupShape, LayerView, ModelShape, RepresentationSpec


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


class ArkVale:
    """Selects the closed units of the highest mean softmaxed score, kept as its logarithm.

    Of equal scores the lower unit wins. The first ``sink_units`` units are forced. Everything
    but the top-k is plain torch: every shape follows from the configuration, nothing waits for
    the device.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        params: dict[str, Any],
        impl: str,
        device: torch.device,
    ) -> None:
        self.model, self.group, self.impl = model, group, impl
        self.sink_units: int = params["sink_units"]
        if type(self.sink_units) is not int or not 0 <= self.sink_units <= group.select:
            raise ConfigError(
                "arkvale",
                [
                    f"sink_units must be an integer of 0 to {group.select}, the units of a "
                    f"selection, got {self.sink_units!r}; lower it or raise the budget"
                ],
            )
        self.work = None
        if impl == "triton":
            self.work = workspace(group.rows, group.max_units, group.select, device)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        shape = (self.group.num_kv_heads, 2, self.group.head_dim)
        return AlgorithmSpec((RepresentationSpec("digest", "unit", shape, self.model.dtype),))

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        unit, tokens = self.group.unit, k.shape[0]
        count = -(-tokens // unit)
        padded = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, count * unit - tokens))
        valid = torch.arange(count * unit, device=k.device).view(count, unit) < tokens
        units = start // unit + torch.arange(count, device=k.device)
        at = self._host_ids(layer, torch.full_like(units, slot), units)
        self._write(layer, at, padded.view(count, unit, *k.shape[1:]), valid)

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: object
    ) -> None:
        """Nothing: the digests are complete at every moment."""

    @hookimpl
    def update(self, layer: LayerView, k: Tensor) -> None:
        step, group = layer.step, self.group
        newest = (step.lengths.long() - 1).clamp(min=0)
        slots, units = step.slots.long().clamp(min=0), newest // group.unit
        keys = layer.ring_k[slots, :, units % group.ring_slots]
        valid = torch.arange(group.unit, device=k.device) <= (newest % group.unit)[:, None]
        # Rows that append nothing write to host page 0, which belongs to nobody.
        writes = (step.slots >= 0) & (step.appended != 0)
        at = torch.where(writes, self._host_ids(layer, slots, units), 0)
        self._write(layer, at, keys.flatten(1, 2).transpose(1, 2), valid)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, native: Tensor | None, ids: Tensor
    ) -> None:
        step, group = layer.step, self.group
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        unit = torch.arange(group.max_units, device=q.device)
        # Behind the closed units stands no page: host page 0 is read, and masked below.
        units = torch.where(unit < closed[:, None], unit, 0)
        at = self._host_ids(layer, step.slots.long().clamp(min=0)[:, None], units)
        scores = head_scores(q[:, 0], layer.pools["digest"][at]) * self.model.scale
        scores = scores.masked_fill(unit >= closed[:, None, None], float("-inf"))
        # In logarithms: the softmax of a unit far below the best one is 0 in fp32.
        by_head = scores.log_softmax(-1) if self.model.num_heads > group.lane_heads else scores
        worth = by_head.unflatten(1, (group.lane_heads, -1)).logsumexp(2)
        worth = worth.masked_fill(unit < self.sink_units, float("inf"))
        lanes = closed.to(torch.int32).repeat_interleave(group.lane_heads)
        topk(worth.flatten(0, 1), lanes, ids, impl=self.impl, work=self.work)

    def _host_ids(self, layer: LayerView, slots: Tensor, units: Tensor) -> Tensor:
        """Host ids of logical units of the requests in ``slots``, int64; shapes broadcast."""
        per_page = self.group.units_per_page
        page = layer.step.page_table[slots, units // per_page].long()
        return page * per_page + units % per_page

    def _write(self, layer: LayerView, at: Tensor, keys: Tensor, valid: Tensor) -> None:
        """Digests of keys ``[n, unit, Hkv, D]`` to the host ids ``at [n]``."""
        pool = layer.pools["digest"]
        pool[at] = digest_of(keys, valid).to(pool.dtype)
