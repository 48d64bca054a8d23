"""Quest with one bug each in its scores and selections."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from topkv import hookimpl
from topkv.ops.topk import topk
from topkv_authoring.language import jit, tl
from topkv_quest.quest import Quest, QuestKernels


class NextUnit(Quest):
    """Off by one: selects the unit behind the one that scored."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights, out)
        out.ids += (out.ids >= 0).int()
        return out


class MeanQuery(Quest):
    """Averages the queries of a group before scoring, which loses the bound."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        grouped = q.unflatten(2, (self.model.num_kv_heads, -1))
        mean = grouped.float().mean(3, keepdim=True).to(q.dtype)
        super().retrieve_topk(layer, mean.expand_as(grouped).flatten(2, 3), weights, out)
        return out


class FirstHeadDecides(Quest):
    """Every lane takes the scores of lane 0."""

    def lane_scores(self, layer, q):
        scores, closed = super().lane_scores(layer, q)
        lanes = scores.unflatten(0, (-1, self.group.lane_heads))
        return lanes[:, :1].expand_as(lanes).flatten(0, 1).contiguous(), closed


class PromisesPlaces(Quest):
    """Says that heads do not matter."""

    @hookimpl
    def spec(self):
        return evolve(super().spec(), heads="none")


class Duplicates(Quest):
    """The best unit twice."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights, out)
        out.ids[:, -1] = out.ids[:, 0]
        return out


class OpenUnitSelectable(Quest):
    """Offers the open unit too, which the core appends: its tokens count twice."""

    def lane_scores(self, layer, q):
        step = layer.step
        layer.step = evolve(
            step, lengths=step.lengths + self.group.unit * (step.lengths > 0).int()
        )
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.step = step


class Unwritten(Quest):
    """Writes the valid ids and leaves what stands behind them."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        kept = out.ids.clone()
        super().retrieve_topk(layer, q, weights, out)
        out.ids.copy_(torch.where(out.ids < 0, kept, out.ids))
        return out


class IgnoresPageTable(Quest):
    """Takes logical ids for host ids."""

    def _identity(self, layer):
        table = layer.step.page_table
        plain = torch.arange(table.numel(), dtype=table.dtype).view_as(table).to(table.device)
        return evolve(layer, step=evolve(layer.step, page_table=plain))

    def _write(self, layer, slots, units, keys, valid):
        super()._write(self._identity(layer), slots, units, keys, valid)

    def lane_scores(self, layer, q):
        return super().lane_scores(self._identity(layer), q)


class RemembersPages(Quest):
    """Copies the page table when a prompt is built, and never looks again."""

    table = None

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        self.table = layer.step.page_table.clone()

    def lane_scores(self, layer, q):
        step = evolve(layer.step, page_table=self.table)
        return super().lane_scores(evolve(layer, step=step), q)


class SlotDict(Quest):
    """Keeps the first selection of each slot and length in a dict, which no reuse clears."""

    def lane_scores(self, layer, q):
        scores, closed = super().lane_scores(layer, q)
        self.seen: dict[Any, Any] = getattr(self, "seen", {})
        lanes = scores.unflatten(0, (-1, self.group.lane_heads))
        for row, slot in enumerate(layer.step.slots.tolist()):
            lanes[row] = self.seen.setdefault(slot, lanes[row].clone())
        return scores, closed


class HighTies(Quest):
    """The higher unit wins among equal scores."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        scores, closed = self.lane_scores(layer, q[:, 0])
        scores += torch.arange(scores.shape[1], device=scores.device) * 1e-6
        topk(scores, closed, out.ids, impl="reference")
        return out


class DriftingTies(Quest):
    """Breaks ties by how often it was called: other ids for the same input."""

    calls = 0

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        self.calls += 1
        scores, closed = self.lane_scores(layer, q[:, 0])
        units = torch.arange(scores.shape[1], device=scores.device)
        scores += (units * self.calls % 7) * 1e-3
        topk(scores, closed, out.ids, impl="reference")
        return out


class NegatesEverySeventh(Quest):
    """Every seventh call of an instance scores the wrong way round."""

    calls = 0

    def lane_scores(self, layer, q):
        self.calls += 1
        scores, closed = super().lane_scores(layer, q)
        return (-scores if self.calls % 7 == 0 else scores), closed


class HoldsScores(Quest):
    """Scores of an instance follow queries slowly: half of each is that of the call before."""

    before = None

    def lane_scores(self, layer, q):
        scores, closed = super().lane_scores(layer, q)
        before, self.before = self.before, scores.clone()
        same = before is not None and before.shape == scores.shape
        return ((scores + before) / 2 if same else scores), closed


class DropsSinks(Quest):
    """Forces no sinks."""

    def lane_scores(self, layer, q):
        sinks, self.sink_units = self.sink_units, 0
        try:
            return super().lane_scores(layer, q)
        finally:
            self.sink_units = sinks


class BudgetInScore(Quest):
    """Prefers units whose number the budget divides."""

    def lane_scores(self, layer, q):
        scores, closed = super().lane_scores(layer, q)
        units = torch.arange(scores.shape[1], device=scores.device)
        return scores + (units % self.group.select == 0).float(), closed


class MissesOne(Quest):
    """Selects one unit less than the budget has."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights, out)
        out.ids[:, -1] = -1
        return out


class FirstQueryForAll(Quest):
    """Scores every row with the query of the first one."""

    def lane_scores(self, layer, q):
        return super().lane_scores(layer, q[:1].nan_to_num().expand_as(q))


class DenseStride(Quest):
    """Takes queries for contiguous, whatever their strides."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        plain = q.as_strided(q.shape, torch.empty(q.shape).stride())
        super().retrieve_topk(layer, plain, weights, out)
        return out


class KernelUnscaled(QuestKernels):
    """The score kernel gets no logit scale: far units underflow, and group means shift."""

    def __init__(self, setup):
        super().__init__(evolve(setup, model=evolve(setup.model, scale=64.0)))


@jit
def without_the_first_channel(q, d, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Channels of which the first is called one that is not there."""
    return q, tl.where(d == 0, D, d), tl.full([q.shape[1]], 1.0, tl.float32)


class KernelLeavesAChannelOut(QuestKernels):
    """Queries are prepared so that the first channel of the pools is not read."""

    prepare_query = without_the_first_channel


@jit
def of_two_sizes(q, d, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Factors of 1 and of 64, by turns."""
    return q, d, tl.where(tl.arange(0, q.shape[1]) % 2 == 0, 1.0, 64.0)


class KernelWeighsHeads(QuestKernels):
    """Scores of every other query head get a factor."""

    prepare_query = of_two_sizes


class KernelAllSlots(QuestKernels):
    """The kernels find the page table of the row, not that of its slot."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step = layer.step
        rows = torch.arange(step.batch, dtype=torch.int32, device=step.slots.device)
        layer.step = evolve(step, slots=torch.where(step.slots < 0, step.slots, rows))
        super().retrieve_topk(layer, q, weights, out)
        layer.step = step
        return out
