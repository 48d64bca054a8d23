"""Mutants of what the coordinator does for latent rows and for a model's own indexer."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from tests.mutants.lifecycle import LifecycleMutant, Run, nothing
from topkv.coordinator import SparseCoordinator
from topkv.kv.representations import RepresentationPools
from topkv.prefill import Prefill
from topkv.testing.machines import scenarios
from topkv.testing.machines.latent import latent_machine
from topkv.testing.tiers import Tier


def scenario(play: scenarios.Scenario, **start: Any) -> Run:
    """One short life of requests with latent rows."""

    def run(on: Tier) -> None:
        scenarios.run_scenario(play, on, make=latent_machine, **{"fast": False, **start})

    return run


_begin = SparseCoordinator.attention_begin


def sharing_layer_lags(self, layer, q, k, v, index=None):
    """A layer without an index goes by what was selected in the step before."""
    path = self.layers[layer]
    if path.shares(index):
        ids, before = path.lanes.ids, vars(self).setdefault("before", {})
        now = ids.clone()
        ids.copy_(before.get(ids.shape, now))
        before[ids.shape] = now
    return _begin(self, layer, q, k, v, index)


_select = Prefill._select


def first_chunk_is_shared(self, path, chunk, q, k, index):
    """What layers share for a chunk is not replaced by what the next one selects."""
    shared = vars(self).setdefault("shared", {})
    ids = _select(self, path, chunk, q, k, index)
    return shared.setdefault((chunk.slot, len(q)), ids) if path.shares(index) else ids


_run = Prefill.run


def chunk_is_not_rounded(self, path, chunk, q, k, v, index, out):
    """A prompt attends to its rows as the model made them."""
    rows = path.rows
    given = [(k, k[..., : rows.value_dim])]

    class Unrounded:
        encode = staticmethod(rows.encode)

        def decode(self, *stored):
            return given.pop() if given else rows.decode(*stored)

    return _run(self, evolve(path, rows=Unrounded()), chunk, q, k, v, index, out)


def first_query_is_kept(self, path, chunk, q, k, v, index, out):
    """A chunk's first query is kept to warm the buffer with, not its last one."""
    remember = self._remember

    def first(view, slot, queries, weights):
        remember(view, slot, queries[:1], None if weights is None else weights[:1])

    self._remember = first
    try:
        _run(self, path, chunk, q, k, v, index, out)
    finally:
        del self._remember


CHUNKS = scenario(scenarios.a_prompt_comes_in_chunks_beside_decode)
PACKED = scenario(scenarios.a_prompt_fills_up_the_unit_that_decode_began, kv_format="fp8")
LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
TWINS = scenario(scenarios.twins_share_pages_and_part)
SPLIT = scenario(scenarios.the_last_page_goes_to_one_of_two)

MUTANTS = [
    LifecycleMutant(
        "a layer that shares goes by the selection of the step before",
        *(SparseCoordinator, "attention_begin", sharing_layer_lags, LONG, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "a layer that shares goes by the selection of an earlier chunk",
        *(Prefill, "_select", first_chunk_is_shared, CHUNKS),
    ),
    LifecycleMutant(
        "a prompt attends to rows that were not rounded",
        *(Prefill, "run", chunk_is_not_rounded, PACKED),
    ),
    LifecycleMutant(
        "fork leaves the index of the open page behind",
        *(RepresentationPools, "copy_page", nothing, TWINS),
    ),
    LifecycleMutant("a fork starts cold", Prefill, "copy", nothing, SPLIT),
    LifecycleMutant(
        "the buffer is warmed by the first query of a chunk",
        *(Prefill, "run", first_query_is_kept, LONG),
    ),
]
