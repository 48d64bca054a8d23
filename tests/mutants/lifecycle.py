"""Mutants of the coordinator: one method of the core is swapped while the kit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, field, frozen
from hypothesis import Phase, settings

from tests.machines import scenarios
from tests.machines.engine_pages import run_engine_pages
from tests.machines.lifecycle import run_lifecycle
from tests.mutants.harness import without_shrinking
from topkv.coordinator import SparseCoordinator
from topkv.decode.selectors import Own
from topkv.decode.streams import SideStream
from topkv.errors import ConfigError, PluginError
from topkv.kv.store import GroupStore
from topkv.memory.representations import RepresentationPools
from topkv.plugins.discovery import hookimpl
from topkv.prompts.ahead import PLACES, HistoryAhead
from topkv.prompts.prefill import Prefill
from topkv.requests.pages import PageTable
from topkv.requests.requests import Requests
from topkv.transfer.geometry import ZeroCopyTransfer
from topkv.transfer.reference import ReferenceTransfer
from topkv.transfer.triton import TritonTransfer
from topkv_testing.tiers import Tier, tier

Run = Callable[[Tier], None]


def the_machine(on: Tier) -> None:
    """A few random lives, always the same ones."""
    few = settings(
        max_examples=12,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        print_blob=False,
    )
    run_lifecycle(on, further=few)


def scenario(play: scenarios.Scenario, **start: Any) -> Run:
    """Return a run of one short life, driven by hand."""

    def run(on: Tier) -> None:
        scenarios.run_scenario(play, on, **{"unit": 2, "buffer": 12, **start})

    return run


@frozen
class LifecycleMutant:
    """One deliberate bug of the core.

    Attributes:
        name: the bug in a few words.
        owner, method: the method that is swapped.
        broken: the method in its place.
        run: the part of the kit that must fail.
        tiers: where the bug can be seen.
    """

    name: str
    owner: Any
    method: str
    broken: Callable[..., Any]
    run: Run = the_machine
    tiers: tuple[str, ...] = field(default=("cpu",))

    def is_caught(self, tier_name: str) -> str | None:
        """Return the failure that the kit reports, or None if the mutant survives."""
        with pytest.MonkeyPatch.context() as patch, without_shrinking():
            patch.setattr(self.owner, self.method, self.broken)
            try:
                self.run(tier(tier_name))
            except pytest.skip.Exception as skipped:
                raise AssertionError(f"{self.name}: the run was skipped: {skipped}") from None
            except (ConfigError, PluginError, TypeError):
                raise  # the mutant does not run at all, so nothing has seen its bug
            except (Exception, pytest.fail.Exception) as failure:
                reported = str(failure).splitlines() or ["no message"]
                return f"{type(failure).__name__}: {reported[0][:160]}"
        return None

    @property
    def twin(self) -> Run:
        """Key of what ``run_clean`` runs."""
        return self.run

    def run_clean(self, tier_name: str) -> None:
        """Run without the bug."""
        self.run(tier(tier_name))


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, instead of the call."""


@hookimpl
def flush_leaves_lru_copy(self, slot, length, high, resident):
    """The open unit goes to the host, and its old LRU copy stays."""
    if not self.sparse or length == 0:
        return
    store, unit = self.store, (length - 1) // self.group.unit
    pages, within = self.host_places(slot, torch.tensor([unit]))
    ring = store.buffer[:, store.lanes_of(slot), self.ring_slot(unit)]
    store.entries[pages, :, :, within] = ring[None]


_rollback = SparseCoordinator.rollback


def rollback_lowers_high(self, slot, length):
    """The ring bound follows the length, although the ring does not."""
    _rollback(self, slot, length)
    self.requests.high[slot] = length


def abort_keeps_plans(self, slots):
    """Plans of a dropped forward are kept, loaded or not."""
    slots = [*slots]
    self.high[slots] = np.maximum(self.high[slots], self.length[slots] + 1)


def begins_without_its_ring(self, pages=(), length=0):
    """A request that begins with pages of another one's tokens has no ring of them."""
    slot = _begin(self, pages)
    self.length[slot], self.settled[:, slot], self.high[slot] = length, length, length
    return slot


_begin = Requests.begin


_construct = Own.construct


def construct_without_open_keys(self, slot, start, k, v, q, lse, index):
    """A chunk that starts inside a unit hands over its own keys alone."""
    _construct(self, slot, start, k[-len(q) :], v[-len(q) :], q, lse, index)


_restore = ZeroCopyTransfer.restore


@hookimpl
def restore_keeps_maps(self, slot, length, resident):
    """Truncate cuts the request, and leaves its units in the buffer."""
    reset = self.reset
    self.reset = nothing
    try:
        _restore(self, slot, length, resident)
    finally:
        self.reset = reset


_restore_all = Requests.restore_all


def restore_forgets_counts(self, slots):
    """Counts of a request are lost with a forward that is dropped."""
    slots = list(slots)
    _restore_all(self, slots)
    for store in self.manager.stores:
        for slot in slots:
            store.forget_counts(slot)


def stale_page_row(self, slot, first, pages):
    """Old pages behind the new ones of a row stay."""
    self.table[slot, first : first + len(pages)] = pages
    self.count[slot] = first + len(pages)
    self._changed.add(slot)


def pages_leak(self, slot, keep):
    """The row of the table is emptied, and its pages stay leased."""
    self.write(slot, min(keep, int(self.count[slot])), [])


def padded_rows_write(append):
    """Slot -1 is taken for slot 0."""

    @hookimpl
    def broken(self, layer, k, v):
        step = layer.step
        through = evolve(
            step,
            slots=step.slots.clamp(min=0),
            lengths=step.lengths.clamp(min=1),
            appended=step.appended | (step.slots < 0).int(),
        )
        append(self, evolve(layer, step=through), k, v)

    return broken


_end = SparseCoordinator.request_end


def end_at_once(self, slot):
    """A request that ends during a forward loses its pages there and then."""
    forward, self.forward = self.forward, None
    try:
        _end(self, slot)
    finally:
        self.forward = forward


_blocks, _join = HistoryAhead.blocks, SideStream.join


def fetched_too_early(self, *chunk):
    """The block after the next overwrites the block that is about to be attended."""
    for block in _blocks(self, *chunk):
        for staged in tuple(self._staged):
            if staged:
                self._fetch_ahead(staged[0] + PLACES)
        yield block


def waits_for_no_mark(self, mark=None):
    """A wait for one mark is left out; a wait for all that was queued is not."""
    if mark is None:
        _join(self)


_cut, _refill = Requests._cut, Requests.restore


def cut_stays_buffered(self, slots, lengths):
    """The prompt buffer goes on to count tokens that were taken back."""
    buffered = self.buffered[slots]
    _cut(self, slots, lengths)
    self.buffered[slots] = buffered


def restore_trusts_the_prompt_buffer(self, slot):
    """A dropped forward leaves its tokens in the prompt buffer."""
    buffered = self.buffered[slot]
    _refill(self, slot)
    self.buffered[slot] = buffered


def hands_over_what_was_there(self, slot):
    """A request has in the prompt buffer what it had before another one's tokens came."""
    self._owner = slot


PROMPTS = scenario(scenarios.prompts_go_on_after_cuts, prompts=48)
EDGE = scenario(scenarios.an_abort_at_the_edge_of_a_unit, fast=False)
LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on, fast=False)
FILL = scenario(scenarios.a_prompt_fills_up_the_unit_that_decode_began, unit=4, buffer=24)
TWINS = scenario(scenarios.twins_share_pages_and_part)
CHUNKS = scenario(scenarios.a_prompt_comes_in_chunks_beside_decode)
LATE = scenario(scenarios.copies_come_late, fast=False)
TURNS = scenario(scenarios.requests_take_turns_in_a_slot)
ENDS = scenario(scenarios.a_request_ends_while_others_decode)
BOTH = ("cpu", "interpret")
TRANSFERS = ((ReferenceTransfer, ("cpu",)), (TritonTransfer, ("interpret",)))
"""Transfer engines, and the tiers on which each runs."""

MUTANTS = [
    *(
        LifecycleMutant(
            "a flush leaves the old LRU copy of the open unit",
            *(owner, "flush", flush_leaves_lru_copy, FILL, tiers),
        )
        for owner, tiers in TRANSFERS
    ),
    LifecycleMutant(
        "the ring bound follows the length on rollback",
        *(SparseCoordinator, "rollback", rollback_lowers_high, LONG),
    ),
    LifecycleMutant(
        "an abort keeps what was planned",
        *(Requests, "restore_all", abort_keeps_plans, EDGE),
    ),
    LifecycleMutant(
        "a request begins with pages and without its ring",
        *(Requests, "begin", begins_without_its_ring, run_engine_pages),
    ),
    LifecycleMutant(
        "keys of the open unit are not handed to construct",
        *(Own, "construct", construct_without_open_keys),
    ),
    LifecycleMutant(
        "a dropped forward takes the counts of its requests along",
        *(Requests, "restore_all", restore_forgets_counts, EDGE),
    ),
    LifecycleMutant(
        "hits and misses outlive their request",
        *(GroupStore, "forget_counts", nothing, TURNS),
    ),
    LifecycleMutant("truncate keeps the maps", ZeroCopyTransfer, "restore", restore_keeps_maps),
    LifecycleMutant(
        "fork loses state that is keyed by slot",
        *(RepresentationPools, "copy_slot", nothing, TWINS),
    ),
    LifecycleMutant("fork shares the open page", PageTable, "own_page", nothing, TWINS, BOTH),
    LifecycleMutant(
        "representations are not copied with their page",
        *(RepresentationPools, "copy_page", nothing, TWINS),
    ),
    LifecycleMutant("settle is not called", Prefill, "settle", nothing),
    LifecycleMutant(
        "a page-table row keeps what stood behind",
        PageTable,
        "write",
        stale_page_row,
    ),
    LifecycleMutant("pages leak at the end", PageTable, "shrink", pages_leak, TURNS),
    LifecycleMutant(
        "state keyed by slot outlives its request",
        RepresentationPools,
        "reset_slot",
        nothing,
        TURNS,
    ),
    *(
        LifecycleMutant(
            "padded rows write through",
            *(owner, "append", padded_rows_write(owner.append), FILL, tiers),
        )
        for owner, tiers in TRANSFERS
    ),
    LifecycleMutant(
        "an end during a forward takes effect at once",
        *(SparseCoordinator, "request_end", end_at_once, ENDS),
    ),
    LifecycleMutant("nothing is flushed", Requests, "flush", nothing, FILL),
    LifecycleMutant("filled units stay in the ring", SparseCoordinator, "offload", nothing),
    LifecycleMutant(
        "nobody waits for the copies of a prompt",
        *(Prefill, "join", nothing, LATE, ("gpu",)),
    ),
    LifecycleMutant(
        "history is fetched over the block that is attended",
        *(HistoryAhead, "blocks", fetched_too_early, CHUNKS),
    ),
    LifecycleMutant(
        "what was taken back stays in the prompt buffer",
        *(Requests, "_cut", cut_stays_buffered, PROMPTS),
    ),
    LifecycleMutant(
        "what was dropped stays in the prompt buffer",
        *(Requests, "restore", restore_trusts_the_prompt_buffer, PROMPTS),
    ),
    LifecycleMutant(
        "the prompt buffer is handed over with what was there",
        *(HistoryAhead, "_hand_over", hands_over_what_was_there, PROMPTS),
    ),
    LifecycleMutant(
        "history is attended before it is there",
        *(SideStream, "join", waits_for_no_mark, LATE, ("gpu",)),
    ),
]
