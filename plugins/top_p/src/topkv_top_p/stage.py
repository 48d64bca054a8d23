"""Twilight's pruning as a stage: of any selection the units that hold the share p of attention.

Lin et al., "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning", NeurIPS 2025,
arXiv 2502.02770. Differences from its code are in the README.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSetup, StageSpec
from topkv.types import LayerView, Selection
from topkv_authoring import outliers
from topkv_authoring.selectors import host_ids
from topkv_top_p import reference
from topkv_top_p.entry import TopPParams

POOLS = ("codes", "meta", "outliers")
"""Pools, in the order in which ``reference.encode`` makes their contents."""


class TopP:
    """Keeps of each lane the smallest set of candidates with the share p of the attention.

    Of every token and kv-head it has a copy of the key in 4 bits a channel, besides the few
    channels that outweigh all others (``topkv_authoring.outliers``), from which it
    estimates logits s, q·k times the logit scale. To query head g a candidate c is worth the
    log-sum-exp of the logits of its tokens, and has the share ``softmax_c(worth_gc)`` among the
    candidates. Candidates are ranked by the largest share that they have to a query head of the
    lane, and the first ones are kept until every head has the share p among them: see
    ``reference.kept``. There are at most K, whatever their share. All queries of a row are query
    heads of its lanes.

    With p = 1 and ``widen`` 1 the selection is what it would be without the stage, at the same
    places. Codes are a function of the key alone: token by token or at once, the bits are the
    same. Keys are finite, and below 2**126 in magnitude.

    Attributes:
        p, widen, outliers: the parameters.
    """

    def __init__(self, setup: StageSetup) -> None:
        """Raise ConfigError with all reasons."""
        self.model, self.group = setup.model, setup.group
        params: TopPParams = setup.params
        self.p, self.widen, self.outliers = params.p, params.widen, params.outliers
        reasons = outliers.refusals(self.model.head_dim)
        if self.model.softcap is not None:
            reasons.append("logits are estimated without a cap, and the model has a softcap")
        if reasons:
            raise ConfigError(type(self).__name__, reasons)

    @hookimpl
    def spec(self) -> StageSpec:
        heads, half = self.model.num_kv_heads, (self.model.head_dim + 1) // 2
        codes = RepresentationSpec("codes", "token", (heads, half), torch.uint8)
        meta = RepresentationSpec("meta", "token", (heads, 2), torch.bfloat16)
        words = RepresentationSpec("outliers", "token", (heads, self.outliers), torch.int32)
        return StageSpec((codes, meta, words), self.widen)

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        at = self._rows(layer, slot, torch.arange(start, start + len(k), device=k.device))
        for name, rows in zip(POOLS, reference.encode(k, self.outliers), strict=True):
            layer.pools[name][at] = rows

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, pools, nth = layer.step, layer.pools, torch.arange(k.shape[1], device=k.device)
        writes = (nth < step.appended[:, None]) & (step.slots >= 0)[:, None]
        tokens = ((step.lengths - step.appended)[:, None] + nth).clamp(min=0)
        # What is not appended writes row 0, which belongs to nobody, and what it holds.
        slots = step.slots.clamp(min=0)[:, None]
        at = torch.where(writes, self._rows(layer, slots, torch.where(writes, tokens, 0)), 0)
        writes = writes[..., None, None]
        new = reference.encode(k.masked_fill(~writes, 0), self.outliers)
        for name, rows in zip(POOLS, new, strict=True):
            pools[name][at] = torch.where(writes, rows, pools[name][at])

    def _rows(self, layer: LayerView, slots: Tensor | int, tokens: Tensor) -> Tensor:
        """Rows of tokens in the pools."""
        unit = self.group.unit
        return host_ids(layer, slots, tokens // unit) * unit + tokens % unit

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        # In ascending order, so that of equal ranks the lower unit is kept.
        absent = self.group.max_units
        units, order = torch.where(candidates.ids < 0, absent, candidates.ids).sort(1)
        there = units < absent
        # The heads of all queries of a row are heads of its lanes.
        heads = q.unflatten(2, (self.group.num_kv_heads, -1)).transpose(1, 2)
        real = (
            torch.arange(q.shape[1], device=q.device) < layer.step.appended.clamp(min=1)[:, None]
        )
        real = real[:, None, :, None].expand(heads.shape[:4]).flatten(1, 3)
        real = real.unflatten(1, (self.group.lane_heads, -1)).flatten(0, 1)
        worth = self.logits(layer, heads.flatten(1, 3), units * there).logsumexp(-1)
        worth = worth.masked_fill(~(there[:, None] & real[..., None]), float("-inf"))
        keep = reference.kept(worth, self.p, out.ids.shape[1])
        keep = torch.zeros_like(keep).scatter(1, order, keep)
        out.ids.copy_(reference.placed(candidates.ids, keep, out.ids.shape[1]))
        return out

    def logits(self, layer: LayerView, q: Tensor, units: Tensor) -> Tensor:
        """Estimated logits of the tokens of units ``[N, K']``, fp32 ``[N, h, K', unit]``."""
        group, lanes = self.group, self.group.lane_heads
        slots = layer.step.slots.clamp(min=0).repeat_interleave(lanes)[:, None, None]
        tokens = units[..., None] * group.unit + torch.arange(group.unit, device=q.device)
        at = self._rows(layer, slots, tokens)
        kept = (layer.pools[name][at] for name in POOLS)
        keys = reference.decode(*kept, self.model.head_dim)
        # Of all kv-heads those of the lane itself: [B, lane, K', unit, heads, D].
        keys = keys.unflatten(0, (-1, lanes)).unflatten(4, (lanes, -1))
        keys = keys.diagonal(dim1=1, dim2=4).movedim(-1, 1)
        queries = q.float().unflatten(1, (lanes, group.heads_per_lane, -1))
        logits = torch.einsum("blhgd,blkuhd->blhgku", queries, keys) * self.model.scale
        return logits.flatten(2, 3).flatten(0, 1)
