"""SnapKV and StreamingLLM with one bug each."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_snapkv.algorithm import SnapKV
from topkv_streaming_llm.algorithm import StreamingLLM


class Unpooled(SnapKV):
    """Keeps the best votes without their neighbours: nothing is pooled."""

    def _choose(self, votes, before):
        params, self.params = self.params, evolve(self.params, kernel=1)
        try:
            return super()._choose(votes, before)
        finally:
            self.params = params


class LastChunkVotes(SnapKV):
    """Only queries of the last chunk of a prompt vote, however short it is."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        layer.pools["voters"][slot] = 0
        super().construct(layer, slot, start, k, v, q, lse)


class ShortWindow(SnapKV):
    """Off by one: the oldest token of the window has to win by votes."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        params = self.params
        self.params = evolve(params, window=params.window - 1)
        try:
            super().settle(layer, slot, since, length, history)
        finally:
            self.params = params


class OutOfOrder(SnapKV):
    """Keeps positions in no order."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        super().settle(layer, slot, since, length, history)
        for lane, count in enumerate(layer.pools["count"][slot].tolist()):
            kept = layer.pools["kept"][slot, lane, :count]
            kept.copy_(kept.flip(0))


class LogitsVote(SnapKV):
    """Votes are unnormalised: a sharp query counts for more than its softmax."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, torch.zeros_like(lse))


class Evicts(SnapKV):
    """A generated token takes the place of one that was kept."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights, out)
        prompt = layer.pools["turn"][layer.step.slots.clamp(min=0).long(), 0]
        grown = (layer.step.lengths - 1 > prompt) & (layer.step.slots >= 0)
        grown = grown.repeat_interleave(self.group.lane_heads)
        moved = torch.cat([out.ids[:, 1:], torch.full_like(out.ids[:, :1], -1)], 1)
        out.ids.copy_(torch.where(grown[:, None], moved, out.ids))
        return out


class RowForSlot(SnapKV):
    """Looks up what was kept by the number of the row, not by its slot."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step = layer.step
        rows = torch.arange(step.batch, dtype=torch.int32, device=step.slots.device)
        layer.step = evolve(step, slots=torch.where(step.slots < 0, step.slots, rows))
        super().retrieve_topk(layer, q, weights, out)
        layer.step = step
        return out


class TailTooShort(SnapKV):
    """Says that over pages of another request one voter less of a prompt need be computed."""

    @hookimpl
    def spec(self):
        spec = super().spec()
        return evolve(spec, prompt_tail=spec.prompt_tail - 1)


class OneSinkTooFew(StreamingLLM):
    """Keeps one unit of sinks less."""

    def __init__(self, setup):
        super().__init__(setup)
        self.sinks = max(self.sinks - 1, 0)


class RoundsSinksDown(StreamingLLM):
    """Sinks that fill no whole unit are dropped."""

    def __init__(self, setup):
        super().__init__(setup)
        self.sinks = setup.params.sink_tokens // setup.group.unit


class LateWindow(StreamingLLM):
    """Off by one: the newest closed unit is not in the window yet."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step, unit = layer.step, self.group.unit
        layer.step = evolve(step, lengths=(step.lengths - unit).clamp(min=0))
        super().retrieve_topk(layer, q, weights, out)
        layer.step = step
        return out


class WindowInTokens(StreamingLLM):
    """Counts the open unit as if it held one token: the window reaches a unit too far."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step, unit = layer.step, self.group.unit
        layer.step = evolve(step, lengths=step.lengths + (unit - 1) * (step.lengths > 0).int())
        super().retrieve_topk(layer, q, weights, out)
        layer.step = step
        return out
