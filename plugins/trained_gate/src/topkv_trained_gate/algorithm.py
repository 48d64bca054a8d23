"""A gate that the model was trained with: its block index says which blocks are worth attending.

MiniMax-M3 projects index queries, a head for each kv-head, and one index key a token, and hands
them down; this algorithm keeps the keys and selects blocks. Prompts select as well, as the model
was trained to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.index import OwnIndex
from topkv_authoring.selectors import closed_units
from topkv_trained_gate.reference import unit_scores, with_local


class TrainedGate(OwnIndex):
    """Selects for each kv-head the units whose best token scores highest.

    ``score(h, u) = max over tokens t of u of q[h] . k[t]``, fp32. The unit that a row is in is
    always attended, and so are the ``local - 1`` units before it: both count into the budget. Of
    equal scores the lower unit wins. A stored key depends on its token alone.

    Several queries of a row select together: a unit is worth the largest of their scores. Units of
    the tokens that the row appends are always attended.
    """

    score_bytes = 64 << 20

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        reasons, lanes = [], self.group.lane_heads
        local, most = setup.params.local, setup.group.select + 1
        if local > most:
            reasons.append(
                f"local must be a number of units from 1 to {most}, which the budget has, got "
                f"{local}; lower it, or raise budget"
            )
        if self.heads != lanes:
            reasons.append(
                f"each kv-head needs an index head of its own, got {self.heads} index "
                f"heads for {lanes} lanes; choose another algorithm"
            )
        if reasons:
            raise ConfigError("trained_gate", reasons)
        self.local = local

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        # Nothing else holds the index keys.
        index = RepresentationSpec("index", "token", (self.dim,), self.model.dtype, derived=False)
        return AlgorithmSpec(representations=(index,))

    def write_index(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        layer.pools["index"][self.token_rows(layer, slots, tokens)] = keys

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step, unit = layer.step, self.group.unit
        rows = self.step_rows(layer, q)
        q, closed = self.index_queries(q, rows), closed_units(layer)
        tokens = torch.arange(self.group.max_units * unit, device=q.device)
        slots = step.slots.clamp(min=0)[:, None]
        # Behind the closed units stands no page: read page 0; top-k leaves its scores out.
        seen = torch.where(tokens < closed[:, None] * unit, tokens, 0)
        keys = layer.pools["index"][self.token_rows(layer, slots, seen)]
        scores = unit_scores(q, keys.repeat_interleave(rows[1], 0), unit).unflatten(0, rows)
        padding = torch.arange(rows[1], device=q.device) >= step.appended.clamp(min=1)[:, None]
        scores = scores.masked_fill(padding[..., None, None], float("-inf")).amax(1)
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
        q = self.index_queries(q, (q.shape[0],))
        for at, ends in self.prompt_blocks(start, q.shape[0], self.heads, q.device):
            tokens = torch.arange(int(ends[-1]) * self.group.unit, device=q.device)
            seen = tokens.clamp(max=start + at.stop - 1)  # its last unit has no more
            keys = layer.pools["index"][self.token_rows(layer, torch.full_like(seen, slot), seen)]
            scores = unit_scores(q[at], keys, self.group.unit)
            self._select(with_local(scores, ends, self.local), ends, ids[at].flatten(0, 1))

    def _select(self, scores: Tensor, ends: Tensor, ids: Tensor) -> None:
        """Select the best ``ids [m * H, W]`` of the first ``ends [m]`` units by ``[m, H, U]``."""
        topk(scores.flatten(0, 1), self._each(ends), ids, impl="reference")

    def _each(self, ends: Tensor) -> Tensor:
        """int32 ``[m * H]`` of ``[m]``."""
        return ends.int().repeat_interleave(self.heads)
