"""Loads that are ahead of their layers, with one bug each."""

from __future__ import annotations

from core.tests.test_loads import compared
from tests.mutants.lifecycle import LifecycleMutant
from topkv.decode.loads import Loads
from topkv.types import Selection

_plan, _load = Loads.plan, Loads.load


def only_planned(self, selection):
    """Missed units are counted as present, and never copied."""
    self._plan(selection)


def by_the_old_selection(self, selection):
    """Loads are begun by what was selected before."""
    found, before = _plan(self, selection), vars(self).get("before", selection)
    self._selection = before if before.ids.shape == selection.ids.shape else selection
    self.before = Selection(selection.ids.clone())
    return found


def but_the_last(self, plan):
    """The load for the last layer that shares is not begun."""
    self._others = self._others[:-1]
    _load(self, plan)


def begun_twice(self, selection):
    """Loads that were planned ahead are planned again in their turn."""
    return self._plan(selection) if self.number else _plan(self, selection)


BROKEN = {
    "planned and not copied": ("begin", only_planned),
    "ahead of the selection": ("plan", by_the_old_selection),
    "the last is left out": ("load", but_the_last),
    "planned twice": ("plan", begun_twice),
}

MUTANTS = [LifecycleMutant(name, Loads, *swap, compared) for name, swap in BROKEN.items()]
