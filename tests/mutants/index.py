"""An exact indexer with one bug each, and the test of the algorithm suite that sees each."""

from __future__ import annotations

from attrs import evolve

from tests.mutants.harness import Mutant, mutated, name_of
from topkv import hookimpl
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.models.indexed import INDEXED, Indexed


class PromptSeesNext(Indexed):
    """A row of a prompt sees the token behind it, if the chunk has one."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        ids.fill_(-1)
        for row in range(len(q)):
            seen = start + min(row + 2, len(q))
            self._best(layer, slot, seen, q[row : row + 1], weights[row : row + 1], ids[row, 0])


class PromptFromZero(Indexed):
    """A later chunk of a prompt selects as if it were the first."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        super().retrieve_prompt(layer, slot, 0, q, weights, ids)


class PromptLeavesIds(Indexed):
    """Short rows of a prompt leave what stands behind their tokens."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        kept = ids.clone()
        super().retrieve_prompt(layer, slot, start, q, weights, ids)
        ids.copy_(kept.where(ids < 0, ids))


class IgnoresSigns(Indexed):
    """Weights count by their size alone."""

    def _best(self, layer, slot, length, q, weights, ids):
        super()._best(layer, slot, length, q, weights.abs(), ids)


class MeanWeight(Indexed):
    """Every head has the mean weight of its row."""

    def _best(self, layer, slot, length, q, weights, ids):
        weights = weights.mean(-1, keepdim=True).expand_as(weights)
        super()._best(layer, slot, length, q, weights, ids)


class FirstWeightsForAll(Indexed):
    """Every row of a step has the weights of the first one."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights[:1].nan_to_num().expand_as(weights), out)
        return out


class WritesIdleRows(Indexed):
    """A row that appends nothing writes the key that it was handed all the same."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        layer.step = evolve(step, appended=(step.lengths > 0).int())
        super().update(layer, k, v)
        layer.step = step


class NewestWaits(Indexed):
    """The newest token can be selected from the next step on."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step = layer.step
        layer.step = evolve(step, lengths=(step.lengths - 1).clamp(min=0))
        super().retrieve_topk(layer, q, weights, out)
        layer.step = step
        return out


class RingForIndex(Indexed):
    """Takes the first elements of the latent row in the ring for the index key."""

    @hookimpl
    def update(self, layer, k, v):
        step, ring = layer.step, layer.ring_k
        place = (step.lengths.long() - 1).clamp(min=0) % self.group.ring_slots
        rows = ring[step.slots.long().clamp(min=0), 0, place, 0, 0]
        super().update(layer, rows[:, None, None, : k.shape[-1]], v)


OPTIONS = AlgorithmOptions(hidden_needles=True, head_needles=True)


def _mutant(broken: type[Indexed], test: str) -> Mutant:
    entry = mutated(INDEXED, broken)
    return Mutant(
        name_of(broken), AlgorithmTests, f"test_{test}", entry, INDEXED, ("cpu",), OPTIONS
    )


AS_DECODE = "prompt_rows_select_what_decode_steps_select"

MUTANTS = [
    _mutant(PromptSeesNext, AS_DECODE),
    _mutant(PromptSeesNext, "prompt_ids_are_well_formed"),
    _mutant(PromptFromZero, AS_DECODE),
    _mutant(PromptLeavesIds, "prompt_ids_are_well_formed"),
    _mutant(IgnoresSigns, "each_weight_is_that_of_its_head"),
    _mutant(MeanWeight, "each_weight_is_that_of_its_head"),
    _mutant(FirstWeightsForAll, "rows_do_not_see_each_other"),
    _mutant(WritesIdleRows, "rows_that_append_nothing_write_nothing"),
    _mutant(NewestWaits, "unit_is_found_as_soon_as_decode_closes_it"),
    _mutant(NewestWaits, "needle_in_a_prompt"),
    _mutant(NewestWaits, AS_DECODE),
    _mutant(RingForIndex, "values_never_matter"),
    _mutant(RingForIndex, "decode_builds_what_a_prompt_builds"),
]
