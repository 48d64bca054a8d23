"""SnapKV: the end of a prompt votes once for what of it is kept.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, arXiv 2404.14469.
Differences from its code: votes are summed over the query heads of a lane instead of choosing per
query head after repeating keys; positions are kept ascending; every prompt votes anew over the
whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History, RepresentationSpec
from topkv.hooks.topk import TopK
from topkv.types import LayerView, Selection
from topkv_authoring.votes import Voting, pooled
from topkv_snapkv import reference
from topkv_snapkv.entry import SnapParams

PROMPT, SETTLED = range(2)
"""Columns of the pool ``turn``: tokens at the last settle; whether one came since the last prompt
chunk."""


class SnapKV(Voting):
    """Keeps ``cap`` positions of the prompt per lane, and the generated ones.

    Pools of grain request, in each layer, beside those of ``voters``:
        kept int32 ``[lanes, cap]`` ascending, -1 behind count int32 ``[lanes]``.
        turn int32 ``[2]``: see ``PROMPT``, ``SETTLED``.

    ``construct`` takes the queries up, whatever the chunks. ``settle`` reads the history once and
    chooses. Decoding changes nothing.

    Attributes:
        params: as in the setup.
        covers: a selection holds all tokens that a request can have. Then all of them are kept,
            and nothing is chosen.
        cap: prompt tokens of a lane.
        work: top-k of the choice; None for plain torch.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        """Raise ConfigError if the budget leaves nothing to choose."""
        self.model, self.group = setup.model, setup.group
        self.params: SnapParams = setup.params
        select, room, window = self.group.select, self.params.generated, self.params.window
        self.covers = select >= self.group.max_units - 1  # of all tokens but the newest
        self.cap = self.group.max_units if self.covers else select - room
        if self.cap <= window and not self.covers:
            reason = (
                f"a selection of {select} tokens less generated = {room} leaves "
                f"{max(self.cap, 0)} for the prompt, and the window alone has {window}; raise "
                f"budget (and max_request_tokens) to at least {window + room + 2}, or lower "
                "generated or window"
            )
            raise ConfigError("snapkv", [reason])
        self.work: TopK | None = None

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        s, lanes = self.params, self.group.lane_heads
        shapes = {"kept": (lanes, self.cap), "count": (lanes,), "turn": (2,)}
        ids = (RepresentationSpec(name, "request", shapes[name], torch.int32) for name in shapes)
        return AlgorithmSpec(
            (*self.voters(), *ids),
            settle_whole=True,
            generated=None if s.slide or self.covers else s.generated,
            prompt_tail=s.window,
        )

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        settled = layer.pools["turn"][slot, SETTLED]
        self.gather_voters(layer, slot, start, k, q, lse, settled)

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        s, lanes, pools = self.params, self.group.lane_heads, layer.pools
        before = pools["kept"][slot].clone()
        window = torch.arange(max(length - s.window, 0), length, device=before.device)
        if length <= self.cap:
            rest = torch.arange(length - len(window), device=before.device).expand(lanes, -1)
        else:
            scores = self.votes(layer, slot, length, history)
            rest = self._choose(scores[:, : length - s.window], before)
        ids = torch.cat([rest.int(), window.int().expand(lanes, -1)], 1)
        ids = torch.where(ids < 0, reference.NEVER, ids).sort(1).values
        ids = torch.where(ids < reference.NEVER, ids, -1)
        pools["kept"][slot] = -1
        pools["kept"][slot, :, : ids.shape[1]] = ids[:, : self.cap]
        pools["count"][slot] = (ids >= 0).sum(1).int()
        pools["turn"][slot, PROMPT], pools["turn"][slot, SETTLED] = length, 1

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Nothing: generated tokens follow from the length."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        s, step, pools = self.params, layer.step, layer.pools
        lanes, slots = self.group.lane_heads, step.slots.clamp(min=0).long()
        lengths = torch.where(step.slots >= 0, step.lengths, 0).repeat_interleave(lanes)
        kept, count = pools["kept"][slots].flatten(0, 1), pools["count"][slots].flatten()
        prompt = pools["turn"][slots, PROMPT].repeat_interleave(lanes)
        # None of the new tokens is selectable: they are attended anyway.
        last = lengths - step.appended.clamp(min=1).repeat_interleave(lanes)
        sizes = (self.cap, s.generated, out.ids.shape[1])
        out.ids.copy_(reference.select(kept, count, prompt, last, *sizes))
        return out

    def _choose(self, votes: Tensor, before: Tensor) -> Tensor:
        """Positions before the window, int32 ``[lanes, ...]`` ascending, -1 behind them.

        Where nobody votes, because the whole window was cut off, what was kept before stays.
        """
        s = self.params
        known = torch.where((before >= 0) & (before < votes.shape[1]), before, votes.shape[1])
        held = torch.nn.functional.pad(torch.zeros_like(votes), (0, 1)).scatter(1, known.long(), 1)
        scores = pooled(votes, s.kernel)
        scores = torch.where((votes > 0).any(), scores, held[:, :-1])
        return reference.best(scores, self.cap - s.window, self.work)
