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
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History, RepresentationSpec
from topkv.hooks.topk import TopK
from topkv.types import LayerView, Selection
from topkv_snapkv import reference
from topkv_snapkv.parameters import read

PROMPT, END, SETTLED = range(3)
"""Columns of the pool ``turn``: tokens at the last settle; where the last prompt chunk ended;
whether a settle came since."""


class SnapKV:
    """Keeps ``cap`` positions of the prompt per lane, and the generated ones.

    Pools of grain request, in each layer:
        queries ``[W, H, D]``, lse fp32 ``[W, H]``, voters int32 ``[W]``: the last W prompt
            queries, that of position p in row ``p % W``; ``voters`` is p + 1, 0 in empty rows.
        kept int32 ``[lanes, cap]`` ascending, -1 behind count int32 ``[lanes]``.
        turn int32 ``[3]``: see ``PROMPT``, ``END``, ``SETTLED``.

    ``construct`` takes the queries up, whatever the chunks; a chunk that does not go on where the
    last one ended, or the first one after a settle, starts a prompt of its own, with voters of
    its own. ``settle`` reads the history once and chooses. Decoding changes nothing.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group
        self.settings = read(self.model, self.group, setup.params)
        self.work: TopK | None = None

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        s, model, lanes = self.settings, self.model, self.group.lane_heads
        heads = model.num_heads
        pools = (
            ("queries", (s.window, heads, model.head_dim), model.dtype),
            ("lse", (s.window, heads), torch.float32),
            ("voters", (s.window,), torch.int32),
            ("kept", (lanes, s.cap), torch.int32),
            ("count", (lanes,), torch.int32),
            ("turn", (3,), torch.int32),
        )
        return AlgorithmSpec(
            tuple(RepresentationSpec(name, "request", *form) for name, *form in pools),
            settle_whole=True,
            generated=None if s.slide or s.covers else s.generated,
            prompt_tail=s.window,
        )

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        count = min(len(q), self.settings.window)
        if count == 0:
            return
        pools, end = layer.pools, start + len(k)
        first = end - len(q)
        voters, turn = pools["voters"][slot], pools["turn"][slot]
        goes_on = (turn[SETTLED] == 0) & (turn[END] >= first)
        voters *= goes_on & (voters <= first)  # none that was taken back
        positions = torch.arange(end - count, end, device=q.device)
        rows = positions % self.settings.window
        pools["queries"][slot, rows] = q[-count:]
        pools["lse"][slot, rows] = lse[-count:]
        voters[rows] = (positions + 1).int()
        turn[END], turn[SETTLED] = end, 0

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        s, lanes, pools = self.settings, self.group.lane_heads, layer.pools
        before = pools["kept"][slot].clone()
        window = torch.arange(max(length - s.window, 0), length, device=before.device)
        if length <= s.cap:
            rest = torch.arange(length - len(window), device=before.device).expand(lanes, -1)
        else:
            scores = self._votes(layer, slot, length, history)
            rest = self._choose(scores[:, : length - s.window], before)
        ids = torch.cat([rest.int(), window.int().expand(lanes, -1)], 1)
        ids = torch.where(ids < 0, reference.NEVER, ids).sort(1).values
        ids = torch.where(ids < reference.NEVER, ids, -1)
        pools["kept"][slot] = -1
        pools["kept"][slot, :, : ids.shape[1]] = ids[:, : s.cap]
        pools["count"][slot] = (ids >= 0).sum(1).int()
        pools["turn"][slot, PROMPT], pools["turn"][slot, SETTLED] = length, 1

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Nothing: generated tokens follow from the length."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        s, step, pools = self.settings, layer.step, layer.pools
        lanes, slots = self.group.lane_heads, step.slots.clamp(min=0).long()
        lengths = torch.where(step.slots >= 0, step.lengths, 0).repeat_interleave(lanes)
        kept, count = pools["kept"][slots].flatten(0, 1), pools["count"][slots].flatten()
        prompt = pools["turn"][slots, PROMPT].repeat_interleave(lanes)
        sizes = (s.cap, s.generated, out.ids.shape[1])
        out.ids.copy_(reference.select(kept, count, prompt, lengths, *sizes))
        return out

    def _votes(self, layer: LayerView, slot: int, length: int, history: History) -> Tensor:
        """fp32 ``[lanes, length]``: the mass that the window's queries give to each position."""
        pools, lanes = layer.pools, self.group.lane_heads
        positions = pools["voters"][slot] - 1
        inside = (positions >= length - self.settings.window) & (positions < length)
        positions = torch.where(inside, positions, -1)
        q, lse = pools["queries"][slot], pools["lse"][slot]
        blocks, done = [], 0
        for start, k, _ in history:
            if start != done:
                raise ValueError(
                    f"snapkv: slot {slot} votes over its whole history, which must come in order "
                    f"from position 0; expected a block at {done}, got one at {start}"
                )
            for first in range(0, len(k), reference.BLOCK):
                keys = k[first : first + reference.BLOCK]
                what = (q, lse, positions, keys, start + first, self.model.scale)
                blocks.append(reference.votes(*what).unflatten(0, (lanes, -1)).sum(1))
            done += len(k)
        if done != length:
            raise ValueError(
                f"snapkv: slot {slot} votes over its {length} tokens, and the history has {done}"
            )
        return torch.cat(blocks, 1)

    def _choose(self, votes: Tensor, before: Tensor) -> Tensor:
        """Positions before the window, int32 ``[lanes, ...]`` ascending, -1 behind them.

        Where nobody votes, because the whole window was cut off, what was kept before stays.
        """
        s = self.settings
        known = torch.where((before >= 0) & (before < votes.shape[1]), before, votes.shape[1])
        held = torch.nn.functional.pad(torch.zeros_like(votes), (0, 1)).scatter(1, known.long(), 1)
        scores = reference.pooled(votes, s.kernel)
        scores = torch.where((votes > 0).any(), scores, held[:, :-1])
        return reference.best(scores, s.cap - s.window, self.work)
