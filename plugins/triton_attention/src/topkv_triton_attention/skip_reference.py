"""Attention that leaves out blocks of keys which matter little, in torch: the option
``skip_softmax`` (Yuan et al., BLASST, arXiv 2512.12087).

The listed keys of a lane are gone through in blocks of ``tile``, in the order of the table. Of
each block the logits are computed. With m the largest logit of a query head up to here, the block
among them, it is left out of softmax and sum, and its values are not read, iff

    largest logit of the block - m < ln(lambda)    for every query head of the kv-head

that sees a token of it, where lambda is ``factor`` over the length of the row's request, and at
most 1. So a block that brings a new maximum is kept, the first always. Parts of a lane that are
gone through side by side ("splits") have a maximum each, and leave out no more than one run would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import Tables
from topkv_triton_attention.reference import Attend, capped, seen_by

TILE = 64
"""Keys of a block; the kernels' own is that of their launch."""


class SkippingAttend(Attend):
    """``attend`` with the option; without lengths in ``tables.attached`` it leaves nothing out.

    Args:
        scale, max_batch, softcap, max_queries: as of ``Attend``.
        factor: lambda times the length of a request; above 0.
        tile: keys of a block.
        splits: parts that each lane is divided into, as equal as blocks allow.

    Attributes:
        skipped: int32 ``[N * heads_per_lane, splits]`` into which each call writes how many blocks
            it left out; None, as it is but in tests, counts nothing.
    """

    skipped: Tensor | None = None

    def __init__(
        self,
        scale: float,
        max_batch: int,
        softcap: float | None = None,
        max_queries: int = 1,
        *,
        factor: float,
        tile: int = TILE,
        splits: int = 1,
    ) -> None:
        super().__init__(scale, max_batch, softcap, max_queries)
        self.factor, self.tile, self.splits = factor, tile, splits

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        out: Tensor,
        lse: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        if tables.attached is not None and len(q):
            skips = self.skips(q, k, tables)
            if self.skipped is not None:
                self.skipped.copy_(skips.sum(-1).flatten(0, 1))
            keep = self._kept(~skips, tables, k.shape[2])
        super().__call__(q, k, v, tables, out, lse, keep)

    def skips(self, q: Tensor, k: Tensor, tables: Tables) -> Tensor:
        """True where a block is left out: ``[N, heads_per_lane, splits, blocks of a split]``."""
        lanes, blocks = len(tables.table), self._blocks(tables, k.shape[2])
        queries = q.float().mul(self.scale).transpose(1, 2)
        queries = queries.reshape(lanes, k.shape[1], -1, q.shape[-1])
        seen = tables.lengths[:, None, None]
        if tables.queries is not None:
            seen = seen_by(tables, *q.shape[:3], k.shape[1])
        context = tables.attached.clamp(min=1).repeat_interleave(lanes // len(q))
        limit = (self.factor / context).clamp(max=1).log()[:, None, None]
        found = []
        for split in range(self.splits):
            top = torch.full(queries.shape[:3], -torch.inf, device=q.device)
            for block in range(blocks):
                logits, live = self._logits(queries, k, tables, seen, split, block)
                peak = logits.amax(-1)
                top = torch.maximum(top, peak)
                small = (peak - top < limit) | (peak == -torch.inf)
                found.append(small.all(-1) & live.any(-1)[:, None])
        return torch.stack(found, -1).unflatten(-1, (self.splits, blocks))

    def _logits(
        self, queries: Tensor, k: Tensor, tables: Tables, seen: Tensor, split: int, block: int
    ) -> tuple[Tensor, Tensor]:
        """fp32 ``[N, heads_per_lane, G * Q, tile]`` of a block, -inf behind the end of the split
        and behind what a head has ``seen``; and which of its tokens are in the split,
        ``[N, tile]``."""
        unit, run = k.shape[2], self._run(tables)[:, None]
        token = split * run + block * self.tile + torch.arange(self.tile, device=k.device)
        live = (token < split * run + run) & (token < tables.lengths[:, None])
        hidden = ~live[:, None, None] | (token[:, None, None] >= seen[..., None])
        token = token.where(live, 0)
        ids = tables.table.gather(1, token // unit).where(live, 0)[:, None]
        head = torch.arange(k.shape[1], device=k.device)[:, None]
        keys = k[ids, head, (token % unit)[:, None]].float()
        logits = capped(queries @ keys.mT, self.softcap)
        return logits.masked_fill(hidden, -torch.inf), live

    def _blocks(self, tables: Tables, unit: int) -> int:
        """Most blocks that a split has."""
        return -(-tables.table.shape[1] * unit // self.tile // self.splits)

    def _run(self, tables: Tables) -> Tensor:
        """Tokens of a split of each lane, whole blocks, ``[N]``."""
        blocks = (tables.lengths + self.tile - 1) // self.tile
        return (blocks + self.splits - 1) // self.splits * self.tile

    def _kept(self, keeps: Tensor, tables: Tables, unit: int) -> Tensor:
        """True for tokens of blocks that are kept, bool ``[N, heads_per_lane, W * unit]``; tokens
        behind the end of a lane have any value."""
        run = self._run(tables)[:, None].clamp(min=1)
        token = torch.arange(tables.table.shape[1] * unit, device=keeps.device)
        split = (token // run).clamp(max=self.splits - 1)
        block = ((token - split * run) // self.tile).clamp(max=keeps.shape[-1] - 1)
        at = (split * keeps.shape[-1] + block)[:, None].expand(-1, keeps.shape[1], -1)
        return keeps.flatten(2).gather(2, at)
