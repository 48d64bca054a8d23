"""The conformance kit on this backend: on a GPU with the library, elsewhere around the documented
one, in Triton's interpreter."""

from __future__ import annotations

import pytest
from attrs import evolve

from topkv_flashinfer import entry, providers
from topkv_testing.backend.bench import BackendOptions
from topkv_testing.backends import BackendTests
from topkv_testing.kit import subject_of
from topkv_testing.tiers import tier

FOUND, TRIED = providers.PARTS["gqa"].first()
[ENTRY] = entry.topkv_register_backends()

# Each head dim and dtype is a module that is compiled for minutes; ``test_gpu`` has others.
# Row sums come out of the matrix unit, from weights in the dtype (``prefill.cuh`` 1880).
OPTIONS = BackendOptions(dims=(128,), dtypes=("bfloat16",), rounded_sums=True)


@pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED))
class TestFlashInfer(BackendTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS


@pytest.mark.parametrize(
    "test",
    [
        "test_attends_to_the_listed_tokens",
        "test_ragged_lengths_in_every_layout",
        "test_an_empty_lane_gives_zero_and_minus_infinity",
        "test_each_query_sees_what_stands_before_it",
        "test_table_ends_with_the_units_of_all_queries",
        "test_lse_is_a_natural_log_that_merges_parts",
        "test_a_lane_reads_nothing_of_other_lanes",
        "test_serves_call_after_call_of_any_batch",
        "test_adapted_table_attends_to_selection_and_tail",
        "test_prefill_of_a_chunk_over_itself_is_causal",
        "test_prefill_over_history_sees_what_is_before",
        "test_prefill_that_sees_nothing",
        "test_prefill_of_blocks_merges_to_the_whole",
    ],
)
def test_around_the_documented_library(test):
    stated = evolve(ENTRY.capabilities, tiers=("interpret",))
    mine = evolve(ENTRY, factories={"triton": "documented:Documented"}, capabilities=stated)
    options = BackendOptions(
        units=(1, 2, 16), groups=(1, 3), dims=(64,), dtypes=("bfloat16", "float16")
    )
    getattr(BackendTests(), test)(subject_of(mine, "backend", tier("interpret"), options))
