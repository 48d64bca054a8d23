"""Selections for the next step, with one bug each."""

from __future__ import annotations

from core.tests.test_carrying import any_rows, compared, copied_before
from tests.mutants.lifecycle import LifecycleMutant
from topkv.carrying import Carrying
from topkv.coordinator import SparseCoordinator
from topkv.loads import Loads, LoadsOfNext
from topkv.ops import carried
from topkv.selectors import Own


def without_the_newest(kept, slots, limit, ids, *, impl):
    """A unit that has closed since is not attended."""
    _take(kept, slots, limit, ids, impl=impl)
    ids[:, -1] = -1


def instead_of_the_last(kept, slots, limit, ids, *, impl):
    """A unit that has closed since takes the place of the newest one that was selected."""
    _take(kept, slots, limit, ids, impl=impl)
    ids[:, -2] = ids[:, -1].where(ids[:, -1] >= 0, ids[:, -2])


def by_row(ids, slots, kept, *, impl):
    """Rows that change places get each other's selections."""
    kept[:, : ids.shape[1]] = ids


def planned_alone(self):
    """Missed units are counted as present, and never copied."""


def of_this_step(self):
    """The copies are for the selection that was attended, not for the next one."""
    Loads.plan(self)


def not_by_fork(self):
    """A fork begins with what the slot has kept of another request."""
    return Own.kept(self)


def at_once(self, q, out, lse):
    """A forward that is dropped leaves what it has selected."""
    _correct(self, q, out, lse)
    self.carried.keep(self.view.step.slots, self.view.index)


def with_the_offload(self):
    """A forward that is dropped behind its offload leaves what it has selected."""
    _offload(self)
    for lanes in self.lanes:
        lanes.end()


_take, _correct = carried.take, Carrying.correct
_offload = SparseCoordinator.offload

BROKEN = {
    "the newest is left out": (carried, "take", without_the_newest),
    "the newest displaces another": (carried, "take", instead_of_the_last),
    "kept by row": (carried, "keep", by_row),
    "for this step": (Carrying, "select", Own.select),
    "prompts keep nothing": (Carrying, "warm", Own.warm),
    "planned and not copied": (LoadsOfNext, "load", planned_alone),
}

MUTANTS = [
    *(LifecycleMutant(f"ahead: {name}", *swap, compared) for name, swap in BROKEN.items()),
    LifecycleMutant("ahead: a fork forgets", Carrying, "kept", not_by_fork, any_rows),
    LifecycleMutant("ahead: a dropped step is kept", Carrying, "correct", at_once, any_rows),
    LifecycleMutant(
        "ahead: kept before the end", SparseCoordinator, "offload", with_the_offload, any_rows
    ),
    LifecycleMutant("ahead: copies too late", LoadsOfNext, "plan", of_this_step, copied_before),
]
