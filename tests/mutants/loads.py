"""Loads that are ahead of their layers, with one bug each."""

from __future__ import annotations

from core.tests.test_loads import compared
from tests.mutants.lifecycle import LifecycleMutant
from topkv.decode.loads import Loads, LoadsAhead, SharedLoads


def only_planned(self):
    """Missed units are counted as present, and never copied."""
    Loads.plan(self)


def by_the_old_selection(self):
    """Loads are begun before the selection is known."""
    for each in self._others:
        each.begin()


def but_the_last(self):
    """The load for the last layer that shares is not begun."""
    Loads.load(self)
    for each in self._others[:-1]:
        each.begin()


def begun_twice(self):
    """Loads that were planned ahead are planned again in their turn."""
    Loads.plan(self)


BROKEN = {
    "planned and not copied": (LoadsAhead, "begin", only_planned),
    "ahead of the selection": (SharedLoads, "plan", by_the_old_selection),
    "the last is left out": (SharedLoads, "load", but_the_last),
    "planned twice": (LoadsAhead, "plan", begun_twice),
}

MUTANTS = [LifecycleMutant(name, *swap, compared) for name, swap in BROKEN.items()]
