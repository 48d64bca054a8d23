"""Mutants of the coordinator's code for latent rows and for a model's own indexer."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from core.tests.test_chunk_attention import test_a_block_of_keys_shows_what_rows_have_selected
from tests.machines import scenarios
from tests.machines.latent import latent_machine
from tests.mutants.lifecycle import LifecycleMutant, Run, nothing
from topkv.decode.selectors import Own, Selector
from topkv.memory.representations import RepresentationPools
from topkv.ops.chunk_attention import Chosen
from topkv.prompts.prefill import Prefill
from topkv_testing.tiers import Tier


def scenario(play: scenarios.Scenario, **start: Any) -> Run:
    """One short life of requests with latent rows."""

    def run(on: Tier) -> None:
        scenarios.run_scenario(play, on, make=latent_machine, **{"fast": False, **start})

    return run


_select = Selector.select_prompt


def first_chunk_is_shared(self, slot, start, q, k, v, index):
    """The selection that layers share for a chunk is not replaced in the next chunk."""
    shared = vars(self).setdefault("shared", {})
    return shared.setdefault((slot, len(q)), _select(self, slot, start, q, k, v, index))


_run = Prefill.run


def chunk_is_not_rounded(self, path, chunk, q, k, v, index, out, sinks):
    """A prompt attends to its rows as the model made them."""
    rows = path.format
    given = [(k, k[..., : rows.value_dim])]

    class Unrounded:
        round, encode = staticmethod(rows.round), staticmethod(rows.encode)

        def decode(self, *stored):
            return given.pop() if given else rows.decode(*stored)

    return _run(self, evolve(path, format=Unrounded()), chunk, q, k, v, index, out, sinks)


_construct = Own.construct


def keeps_nothing(self):
    """A fork gets nothing with which to warm its buffer."""
    return {}


def first_query_is_kept(self, slot, start, k, v, q, lse, index):
    """A chunk's first query is kept to warm the buffer with, not its last one."""
    _construct(self, slot, start, k, v, q, lse, index)
    queries, _, weights = self._inputs(q, k, index)
    self._last_queries[slot] = queries[0]
    if weights is not None:
        self._last_weights[slot] = weights[0]


_columns = Chosen.columns


def block_begins_at_zero(self, rows, lane, first, count):
    """Columns are counted from the first token of the request, in any block of its history."""
    return _columns(self, rows, lane, 0, count)


def first_token_of_a_unit(self, rows, lane, first, count):
    """A row sees the first token of each unit that it has selected."""
    return _columns(self, rows, lane, first, count)[:, :: self.unit]


def blocks_of_keys(on: Tier) -> None:
    """See the test."""
    test_a_block_of_keys_shows_what_rows_have_selected()


CHUNKS = scenario(scenarios.a_prompt_comes_in_chunks_beside_decode)
PACKED = scenario(scenarios.a_prompt_fills_up_the_unit_that_decode_began, kv_format="fp8")
LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
TWINS = scenario(scenarios.twins_share_pages_and_part)
SPLIT = scenario(scenarios.the_last_page_goes_to_one_of_two)

MUTANTS = [
    LifecycleMutant(
        "a layer that shares uses the selection of an earlier chunk",
        *(Selector, "select_prompt", first_chunk_is_shared, CHUNKS),
    ),
    LifecycleMutant(
        "a prompt attends to rows that were not rounded",
        *(Prefill, "run", chunk_is_not_rounded, PACKED),
    ),
    LifecycleMutant(
        "fork leaves the index of the open page behind",
        *(RepresentationPools, "copy_page", nothing, TWINS),
    ),
    LifecycleMutant("a fork starts cold", Own, "kept", keeps_nothing, SPLIT),
    LifecycleMutant(
        "the buffer is warmed by the first query of a chunk",
        *(Own, "construct", first_query_is_kept, LONG),
    ),
    LifecycleMutant(
        "a block of history is listed as if it were the first",
        *(Chosen, "columns", block_begins_at_zero, blocks_of_keys),
    ),
    LifecycleMutant(
        "a prompt's rows see one token of a unit",
        *(Chosen, "columns", first_token_of_a_unit, blocks_of_keys),
    ),
]
