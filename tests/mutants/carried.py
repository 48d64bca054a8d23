"""Selections for the next step, with one bug each."""

from __future__ import annotations

from core.tests.test_carrying import any_rows, compared, copied_before
from tests.mutants.lifecycle import LifecycleMutant
from topkv.carrying import Carrying
from topkv.loads import Loads, LoadsOfNext
from topkv.ops import carried
from topkv.selectors import Own


def without_the_newest(kept, slots, limit, ids, *, impl):
    """A unit that has closed since is not attended."""
    lanes = len(ids) // max(1, len(slots))
    for lane in range(len(ids)):
        slot = int(slots[lane // lanes])
        ids[lane] = kept[slot * lanes + lane % lanes] if slot >= 0 else -1


def by_row(ids, slots, kept, *, impl):
    """Rows that change places have each other's."""
    kept[: len(ids)] = ids


def planned_alone(self):
    """What is missed is counted as there, and never copied."""


def of_this_step(self):
    """The copies are those of the selection that was attended."""
    Loads.plan(self)


def not_by_fork(self):
    """A fork begins with what the slot has kept of another request."""
    return Own.kept(self)


BROKEN = {
    "the newest is left out": (carried, "take", without_the_newest),
    "kept by row": (carried, "keep", by_row),
    "for this step": (Carrying, "select", Own.select),
    "prompts keep nothing": (Carrying, "warm", Own.warm),
    "planned and not copied": (LoadsOfNext, "load", planned_alone),
}

MUTANTS = [
    *(LifecycleMutant(f"ahead: {name}", *swap, compared) for name, swap in BROKEN.items()),
    LifecycleMutant("ahead: a fork forgets", Carrying, "kept", not_by_fork, any_rows),
    LifecycleMutant("ahead: copies too late", LoadsOfNext, "plan", of_this_step, copied_before),
]
