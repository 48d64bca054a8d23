"""Bugs of algorithms, and the test of the algorithm suite that sees each."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.mutants import algorithm_selecting as selecting
from tests.mutants import algorithm_sticky as sticky
from tests.mutants import algorithm_writing as writing
from tests.mutants.harness import Mutant, mutated, name_of
from topkv.entries import PluginEntry
from topkv_quest.entry import topkv_register_algorithms
from topkv_quest.quest import Quest, QuestKernels
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests

QUEST: PluginEntry = topkv_register_algorithms()[0]


def _sinks(length, bench):
    return set(range(min(bench.params.sink_units, (length - 1) // bench.group.unit)))


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"sink_units": st.integers(0, 2)}),
    promised=_sinks,
    selects=(2, 3, 5),
    hidden_needles=True,
    head_needles=True,
)


def _mutant(broken: type[Quest], test: str, tiers: tuple[str, ...] = ("cpu",)) -> Mutant:
    entry = mutated(QUEST, broken, QuestKernels)
    return Mutant(name_of(broken), AlgorithmTests, f"test_{test}", entry, QUEST, tiers, OPTIONS)


ANYWHERE = ("cpu", "interpret")
REMEMBERS = "an_instance_remembers_nothing"
AS_REFERENCE = "kernels_select_what_the_reference_selects"

MUTANTS = [
    _mutant(selecting.NextUnit, "ids_are_well_formed", ANYWHERE),
    _mutant(selecting.NextUnit, "needle_in_a_prompt"),
    _mutant(writing.RepresentsNextUnit, "requests_write_to_their_own_units"),
    _mutant(writing.RepresentsNextUnit, "unit_is_found_as_soon_as_decode_closes_it"),
    _mutant(writing.Accumulates, "reused_slot_and_pages_hold_nothing_old"),
    _mutant(writing.UpdateAccumulates, "rejected_tokens_leave_nothing"),
    _mutant(writing.MeanKeys, "needle_in_a_prompt"),
    _mutant(selecting.MeanQuery, "every_query_head_finds_its_needle", ANYWHERE),
    _mutant(writing.OtherHead, "needle_in_a_prompt"),
    _mutant(selecting.FirstHeadDecides, "heads_are_alike"),
    _mutant(selecting.FirstHeadDecides, "needle_in_a_prompt"),
    _mutant(selecting.FirstHeadDecides, "heads_do_not_see_each_other"),
    _mutant(selecting.PromisesPlaces, "heads_do_not_see_each_other"),
    _mutant(writing.PaddingWrites, "rows_that_append_nothing_write_nothing", ANYWHERE),
    _mutant(writing.IdleRowsWrite, "rows_that_append_nothing_write_nothing"),
    _mutant(selecting.Duplicates, "ids_are_well_formed", ANYWHERE),
    _mutant(selecting.OpenUnitSelectable, "length_edges"),
    _mutant(selecting.Unwritten, "ids_are_well_formed", ANYWHERE),
    _mutant(writing.ForgetsNewest, "decode_builds_what_a_prompt_builds"),
    _mutant(writing.ForgetsNewest, "unit_is_found_as_soon_as_decode_closes_it"),
    _mutant(writing.ForgetsOpenTokens, "chunks_of_a_prompt_do_not_matter", ANYWHERE),
    _mutant(selecting.IgnoresPageTable, "requests_write_to_their_own_units"),
    _mutant(selecting.RemembersPages, "moved_page_takes_its_representations_along"),
    _mutant(selecting.SlotDict, "reused_slot_and_pages_hold_nothing_old"),
    _mutant(selecting.SlotDict, "fork_is_a_request_of_its_own"),
    _mutant(selecting.HighTies, "ties_go_to_the_lower_unit"),
    _mutant(selecting.DriftingTies, "same_input_gives_the_same_bits"),
    _mutant(selecting.NegatesEverySeventh, REMEMBERS, ANYWHERE),
    _mutant(selecting.HoldsScores, REMEMBERS),
    _mutant(selecting.DropsSinks, "promised_units_are_selected"),
    _mutant(selecting.BudgetInScore, "budgets_are_nested"),
    _mutant(selecting.MissesOne, "covering_budget_selects_all", ANYWHERE),
    _mutant(selecting.MissesOne, "massive_ties_still_fill_the_budget"),
    _mutant(selecting.FirstQueryForAll, "rows_do_not_see_each_other"),
    _mutant(selecting.FirstQueryForAll, "slots_and_host_pages_do_not_matter"),
    _mutant(writing.ReadsValues, "values_never_matter"),
    _mutant(writing.TailInBounds, "decode_builds_what_a_prompt_builds", ANYWHERE),
    _mutant(writing.DependsOnQueries, "full_pages_do_not_depend_on_what_follows", ANYWHERE),
    _mutant(selecting.DenseStride, "strides_of_queries_do_not_matter", ANYWHERE),
    _mutant(writing.KernelForgetsNewest, "decode_builds_what_a_prompt_builds", ("interpret",)),
    _mutant(selecting.KernelUnscaled, AS_REFERENCE, ("interpret",)),
    _mutant(selecting.KernelLeavesAChannelOut, AS_REFERENCE, ("interpret",)),
    _mutant(selecting.KernelWeighsHeads, AS_REFERENCE, ("interpret",)),
    _mutant(selecting.KernelAllSlots, "slots_and_host_pages_do_not_matter", ("interpret",)),
    _mutant(sticky.Unasked, "what_is_on_the_device_changes_nothing_unasked", ANYWHERE),
    _mutant(sticky.PrefersAbsent, "a_bonus_draws_what_is_on_the_device", ANYWHERE),
    _mutant(sticky.ForgetsRing, "a_bonus_draws_what_is_on_the_device"),
    _mutant(sticky.FirstLanesBuffer, "a_bonus_draws_what_is_on_the_device"),
    _mutant(sticky.OthersBuffer, "a_row_goes_by_its_own_buffer", ANYWHERE),
    _mutant(sticky.StaleBuffer, "a_graph_reads_the_buffer_of_its_replay", ("gpu",)),
    _mutant(writing.SyncsHost, "decode_step_replays_from_a_graph", ("gpu",)),
]
