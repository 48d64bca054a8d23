"""The stage: a selection of tokens becomes a selection of the units that hold them.

The step that TensorRT-LLM takes between what an algorithm predicts and what its attention reads
(its sparse attention guide, "AttentionOp behavior"): indices that are unordered, or finer than a
page, become ordered, page-aligned ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.stage import StageSetup, StageSpec
from topkv.types import LayerView, Selection


class Regranulate:
    """The contract is ``topkv.hooks.stage``; this is the reference.

    Attributes:
        extra: int64 ``[L, max_lanes]`` tokens that each layer of the group which selects for
            itself has attended beyond its selection in its last step, by lane.
    """

    def __init__(self, setup: StageSetup) -> None:
        self.group = group = setup.group
        shape = (len(group.layers), group.max_lanes)
        self.extra = torch.zeros(shape, dtype=torch.int64, device=setup.device)

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec()

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        extra = self.extra[layer.index, : len(out.ids)]
        appended = layer.step.appended if q.shape[1] > 1 else None
        self.list_units(candidates.ids, layer.step.lengths, out.ids, extra, appended)
        return out

    def list_units(
        self,
        tokens: Tensor,
        lengths: Tensor,
        ids: Tensor,
        extra: Tensor,
        appended: Tensor | None = None,
    ) -> None:
        """List the closed units that hold a selected token, each once, in ascending order. Hot.

        With ``closed = max(length - new, 0) // unit`` and ``counted = {t in tokens[n] : 0 <= t <
        closed * unit}`` the units of lane n are ``sorted({t // unit : t in counted})``, and
        ``extra[n] = unit * units - |counted|``. Tokens of the open unit, and of all units with new
        tokens, which are attended anyway, and -1 fall out.

        Args:
            tokens: int32 ``[N, K']``, unique in a row, in any order, -1 anywhere.
            lengths: int32 ``[B]`` tokens of each row, 0 in padded ones; lane n is one of the
                ``N / B`` lanes of row ``n // (N / B)``.
            ids: int32 ``[N, K]``, every element written: units, -1 behind them. ``K >=
                min(K', max_units)``, so that none is lost.
            extra: int64 ``[N]`` tokens of the listed units that were not selected.
            appended: int32 ``[B]`` where rows have several queries: ``new`` is 1 or as many.
        """
        if not len(tokens):
            return
        unit, units = self.group.unit, self.group.max_units
        new = 1 if appended is None else appended.clamp(min=1)
        closed = ((lengths - new).clamp(min=0) // unit).clamp(max=units)
        end = closed.repeat_interleave(len(tokens) // len(closed))[:, None] * unit
        counted = (tokens >= 0) & (tokens < end)
        place = torch.where(counted, tokens // unit, units).long()
        held = torch.zeros((len(tokens), units + 1), dtype=torch.bool, device=tokens.device)
        held = held.scatter_(1, place, True)[:, :units]
        column = torch.arange(units, device=tokens.device)
        ordered = torch.where(held, column, units).sort(1).values[:, : ids.shape[1]]
        ids.fill_(-1)
        ids[:, : ordered.shape[1]] = torch.where(ordered < units, ordered, -1)
        extra.copy_(held.sum(1) * unit - counted.sum(1))
