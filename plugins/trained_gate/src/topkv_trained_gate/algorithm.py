"""A gate that the model was trained with: its block index says which blocks are worth attending.

MiniMax-M3 projects index queries, a head for each kv-head, and one index key a token, and hands
them down; this algorithm keeps the keys and selects blocks. Prompts select as well, as the model
was trained to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_trained_gate.reference import unit_scores, with_local

SCORE_BYTES = 64 << 20
"""Most bytes of the products of a block of prompt rows."""

PROMPT_ROWS = 512
"""Most prompt rows of a block, for which top-k has its scratch."""


class TrainedGate:
    """Selects for each kv-head the units whose best token scores highest.

    ``score(h, u) = max over tokens t of u of q[h] . k[t]``, fp32. The unit that a row is in is
    always attended, and so are the ``local - 1`` units before it: both count into the budget. Of
    equal scores the lower unit wins. A stored key depends on its token alone.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group
        reasons, indexer, lanes = [], setup.model.indexer, setup.group.lane_heads
        assert indexer is not None  # the entry needs one
        local, most = setup.params.local, setup.group.select + 1
        if local > most:
            reasons.append(
                f"local must be a number of units from 1 to {most}, which the budget has, got "
                f"{local}; lower it, or raise budget"
            )
        if indexer.num_heads != lanes:
            reasons.append(
                f"each kv-head needs an index head of its own, got {indexer.num_heads} index "
                f"heads for {lanes} lanes; choose another algorithm"
            )
        if reasons:
            raise ConfigError("trained_gate", reasons)
        self.heads, self.dim, self.local = lanes, indexer.head_dim, local

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        # Nothing else holds the index keys.
        index = RepresentationSpec("index", "token", (self.dim,), self.model.dtype, derived=False)
        return AlgorithmSpec(representations=(index,))

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        k = self._keys(k, k.shape[0])
        tokens = start + torch.arange(k.shape[0], device=k.device)
        layer.pools["index"][self._at(layer, torch.full_like(tokens, slot), tokens)] = k

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        k = k[:, 0]
        step = layer.step
        k = self._keys(k, step.batch)
        rows = (step.slots >= 0) & (step.lengths > 0) & (step.appended != 0)
        at = self._at(layer, step.slots[rows], step.lengths[rows] - 1)
        layer.pools["index"][at] = k[rows]

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step, unit = layer.step, self.group.unit
        q = self._queries(q, (step.batch, 1))
        closed = ((step.lengths - 1).clamp(min=0) // unit) * (step.slots >= 0)
        tokens = torch.arange(self.group.max_units * unit, device=q.device)
        slots = step.slots.clamp(min=0)[:, None]
        # Behind the closed units stands no page: read page 0; top-k leaves its scores out.
        seen = torch.where(tokens < closed[:, None] * unit, tokens, 0)
        scores = unit_scores(q, layer.pools["index"][self._at(layer, slots, seen)], unit)
        self._select(with_local(scores, closed, self.local - 1), closed, out.ids)
        return out

    @hookimpl
    def retrieve_prompt(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        q: Tensor,
        weights: Tensor | None,
        ids: Tensor,
    ) -> None:
        q = self._queries(q, (q.shape[0],))
        for at, ends in self._blocks(start, q.shape[0], q.device):
            tokens = torch.arange(int(ends[-1]) * self.group.unit, device=q.device)
            seen = tokens.clamp(max=start + at.stop - 1)  # its last unit has no more
            keys = layer.pools["index"][self._at(layer, torch.full_like(seen, slot), seen)]
            scores = unit_scores(q[at], keys, self.group.unit)
            self._select(with_local(scores, ends, self.local), ends, ids[at].flatten(0, 1))

    def _select(self, scores: Tensor, ends: Tensor, ids: Tensor) -> None:
        """Select the best ``ids [m * H, W]`` of the first ``ends [m]`` units by ``[m, H, U]``."""
        topk(scores.flatten(0, 1), self._each(ends), ids, impl="reference")

    def _each(self, ends: Tensor) -> Tensor:
        """int32 ``[m * H]`` of ``[m]``."""
        return ends.int().repeat_interleave(self.heads)

    def _blocks(
        self, start: int, rows: int, device: torch.device
    ) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of prompt rows whose products find room: the rows, counted from ``start``, and
        how many units each of them lists, its own the last, int32 ``[m]``."""
        each = 4 * (start + rows) * self.heads
        most = max(1, min(SCORE_BYTES // each, PROMPT_ROWS))
        for first in range(0, rows, most):
            at = slice(first, min(first + most, rows))
            places = torch.arange(start + at.start, start + at.stop, device=device)
            yield at, (places // self.group.unit + 1).int()

    def _at(self, layer: LayerView, slots: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the pool, int64, of tokens of requests; both broadcast."""
        page = self.group.page_tokens
        return layer.step.page_table[slots, tokens // page].long() * page + tokens % page

    def _keys(self, k: Tensor, rows: int) -> Tensor:
        """Keys ``[n, D]`` of ``[n, 1, D]``."""
        self._check("k", k, (rows, 1, self.dim))
        return k[:, 0]

    def _queries(self, q: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Queries ``[n, H, D]`` of ``[*rows, H, D]``."""
        self._check("q", q, (*rows, self.heads, self.dim))
        return q.flatten(0, -3)

    def _check(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(x.shape) != shape:
            raise ValueError(
                f"trained_gate: expected {name} of the index {list(shape)}, got {list(x.shape)}; "
                "the engine has to hand down what the model's own index projects"
            )
