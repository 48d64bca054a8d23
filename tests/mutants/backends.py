"""Backends with one bug each, for ``topkv_testing.backends``.

Most of them hand something wrong to the real Triton backend, or spoil what it returns, so that
the same bug is seen on its reference and on its kernels.
"""

from __future__ import annotations

import math

import torch
from attrs import evolve

from tests.mutants._backend_attend import (
    EmptyLaneNaN,
    EmptyLaneOfPositiveInfinity,
    EmptyLaneUnwritten,
    FirstTableKept,
    HeadsInterleaved,
    LanesByLengthKeptSorted,
    LogsOfBaseTwo,
    MasksByMultiplying,
    PartialUnitFirst,
    ScaleOfItsOwn,
    ScalesQueriesInPlace,
    SoftmaxWithoutMaximum,
    TableOfTheFirstHead,
    UnitsSorted,
    WritesPastTheBatch,
)
from tests.mutants._backend_tables import (
    FirstPlanKept,
    HeadMajorRows,
    HostIdsInTheTable,
    NegativeBehindTheLastColumn,
    NewestTokenForgotten,
    OneUnitOfSeveral,
    PaddingKeepsItsLength,
    RowsWithoutTheRing,
    TailAlwaysAppended,
    TailAtK,
    ThousandColumns,
)
from tests.mutants.harness import Mutant, mutated, name_of
from topkv import hookimpl
from topkv_testing.backends import BackendTests
from topkv_testing.doubles import GATHER
from topkv_triton_attention.backend import HEAD_DIMS, TritonAttention
from topkv_triton_attention.entry import topkv_register_backends
from topkv_triton_attention.kernel_backend import TritonAttentionKernels

[TRITON] = topkv_register_backends()
# The entry leaves head dims to the backend, for the sake of latent rows; the kit needs them.
TRITON = evolve(TRITON, capabilities=evolve(TRITON.capabilities, head_dims=HEAD_DIMS))

# Beside the double of that name, which every registry of the kit has.
GATHER_TWIN = evolve(GATHER, name="gather_twin")


# Prefill.


class SeesTheNextToken(TritonAttention):
    """A query sees one key too many."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k, v, q_start + 1, k_start, out, lse)


class MissesItsOwnKey(TritonAttention):
    """A query does not see the key of its own position."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k, v, q_start - 1, k_start, out, lse)


class CausalByRow(TritonAttention):
    """The mask counts rows and columns, as if chunk and keys began at one position."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k, v, k_start, k_start, out, lse)


class OneBlockOfKeys(TritonAttention):
    """Keys behind the first 128 are not read."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k[:128], v[:128], q_start, k_start, out, lse)


class PrefillOfContiguousRows(TritonAttention):
    """The result of prefill goes to rows that stand behind each other, wherever its own stand."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        strides = torch.empty(out.shape, device="meta").stride()
        super().prefill(q, k, v, q_start, k_start, out.as_strided(out.shape, strides), lse)


class PrefillLogsOfBaseTwo(TritonAttention):
    """The log-sum-exp of prefill is to base 2."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k, v, q_start, k_start, out, lse)
        lse.div_(math.log(2))


class MaskedByALargeNumber(TritonAttention):
    """Masked logits are large and negative, so that a query that sees nothing averages all."""

    @hookimpl
    def prefill(self, q, k, v, q_start, k_start, out, lse):
        super().prefill(q, k, v, q_start, k_start, out, lse)
        blind = lse == -torch.inf
        if len(k) and bool(blind.any()):
            mean = v.float().mean(0).repeat_interleave(q.shape[1] // k.shape[1], 0)
            out.copy_(torch.where(blind[..., None], mean, out))


# Bugs that only a device shows.


class WaitsForTheDevice(TritonAttention):
    """The longest lane is read on the host, to choose the launch."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        lengths = tables.lengths
        if not (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            int(lengths.max())
        super().attend(q, k, v, tables, out, lse)


class AllocatesInDecode(TritonAttention):
    """A result of its own is made in every call, and copied."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        mine = torch.empty_like(out)
        super().attend(q, k, v, tables, mine, lse)
        out.copy_(mine)


class LengthsOfTheFirstCall(TritonAttention):
    """Lengths are copied when their address is first seen, so that a graph replays old ones."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        self.kept = getattr(self, "kept", {})
        lengths = tables.lengths
        kept = self.kept.setdefault(lengths.data_ptr(), lengths.clone())
        super().attend(q, k, v, evolve(tables, lengths=kept), out, lse)


_BOTH = ("cpu", "interpret")


def _mutant(broken, test, clean=TRITON, tiers=_BOTH):
    entry = mutated(clean, broken, TritonAttentionKernels if clean is TRITON else None)
    return Mutant(name_of(broken), BackendTests, test, entry, clean, tiers)


MUTANTS = [
    _mutant(TailAtK, "test_table_follows_the_formula"),
    _mutant(OneUnitOfSeveral, "test_table_ends_with_the_units_of_all_queries"),
    _mutant(NewestTokenForgotten, "test_adapted_table_attends_to_selection_and_tail"),
    _mutant(HeadMajorRows, "test_table_follows_the_formula"),
    _mutant(RowsWithoutTheRing, "test_adapted_table_attends_to_selection_and_tail"),
    _mutant(HostIdsInTheTable, "test_table_follows_the_formula"),
    _mutant(PaddingKeepsItsLength, "test_padded_rows_have_no_tokens"),
    _mutant(NegativeBehindTheLastColumn, "test_table_follows_the_formula"),
    _mutant(TailAlwaysAppended, "test_table_of_an_algorithm_whose_tail_competes"),
    _mutant(ThousandColumns, "test_wide_tables"),
    _mutant(FirstPlanKept, "test_serves_plan_after_plan_of_any_batch"),
    _mutant(PartialUnitFirst, "test_ragged_lengths_in_every_layout"),
    _mutant(UnitsSorted, "test_order_and_place_of_units_do_not_matter"),
    _mutant(TableOfTheFirstHead, "test_a_lane_reads_nothing_of_other_lanes"),
    _mutant(LanesByLengthKeptSorted, "test_permuted_lanes_permute_the_result"),
    _mutant(FirstTableKept, "test_serves_call_after_call_of_any_batch"),
    _mutant(LogsOfBaseTwo, "test_lse_is_a_natural_log_that_merges_parts"),
    _mutant(EmptyLaneNaN, "test_an_empty_lane_gives_zero_and_minus_infinity"),
    _mutant(EmptyLaneOfPositiveInfinity, "test_an_empty_lane_gives_zero_and_minus_infinity"),
    _mutant(EmptyLaneUnwritten, "test_ragged_lengths_in_every_layout"),
    _mutant(ScaleOfItsOwn, "test_attends_to_the_listed_tokens"),
    _mutant(HeadsInterleaved, "test_attends_to_the_listed_tokens"),
    _mutant(WritesPastTheBatch, "test_serves_call_after_call_of_any_batch"),
    _mutant(ScalesQueriesInPlace, "test_attends_to_the_listed_tokens"),
    _mutant(MasksByMultiplying, "test_ragged_lengths_in_every_layout", GATHER_TWIN, ("cpu",)),
    _mutant(SoftmaxWithoutMaximum, "test_large_logits_do_not_overflow", GATHER_TWIN, ("cpu",)),
    _mutant(SeesTheNextToken, "test_prefill_of_a_chunk_over_itself_is_causal"),
    _mutant(MissesItsOwnKey, "test_prefill_of_a_chunk_over_itself_is_causal"),
    _mutant(CausalByRow, "test_prefill_over_history_sees_what_is_before"),
    _mutant(OneBlockOfKeys, "test_prefill_beyond_one_block"),
    _mutant(PrefillOfContiguousRows, "test_prefill_beyond_one_block"),
    _mutant(PrefillLogsOfBaseTwo, "test_prefill_of_blocks_merges_to_the_whole"),
    _mutant(MaskedByALargeNumber, "test_prefill_that_sees_nothing"),
    _mutant(LengthsOfTheFirstCall, "test_graph_replay_follows_its_inputs", tiers=("gpu",)),
    _mutant(WaitsForTheDevice, "test_hot_hooks_read_nothing_on_the_host", tiers=("interpret",)),
    _mutant(WaitsForTheDevice, "test_decode_neither_synchronizes_nor_allocates", tiers=("gpu",)),
    _mutant(AllocatesInDecode, "test_decode_neither_synchronizes_nor_allocates", tiers=("gpu",)),
]
