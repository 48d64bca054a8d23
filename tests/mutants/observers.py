"""Observers with one bug each, and the test of the suite that sees each."""

from __future__ import annotations

from typing import ClassVar

from tests.mutants.harness import Mutant, name_of
from topkv.decode.loads import Loads
from topkv.entries import PluginEntry
from topkv.plugins.discovery import hookimpl
from topkv_testing.observers import ObserverOptions, ObserverTests

OPTIONS = ObserverOptions(
    says=lambda observer: sum(observer.misses),
    oracle=lambda reported: sum(each.transfers.misses for each in reported if each.ended),
)


class Sums:
    """Misses of decode rows when their forwards ended."""

    def __init__(self, setup):
        self.misses = []

    @hookimpl
    def before_forward(self, report):
        """Do nothing: nothing is missed yet."""

    @hookimpl
    def after_forward(self, report):
        self.misses.append(report.transfers().misses)


class CountsTooEarly(Sums):
    """Misses are read when a forward begins, which may be dropped."""

    @hookimpl
    def before_forward(self, report):
        self.misses.append(report.transfers().misses)

    @hookimpl
    def after_forward(self, report):
        """Do nothing: misses are counted already."""


class NeedsARow(Sums):
    """A forward of a prompt alone is an error."""

    @hookimpl
    def after_forward(self, report):
        _ = report.slots[0]
        super().after_forward(report)


class SharesItsSums(Sums):
    """All observers of a process add to one sum."""

    shared: ClassVar[list[int]] = []

    def __init__(self, setup):
        self.misses = self.shared


class CannotBind(Sums):
    """It raises when it is bound to the layers."""

    @hookimpl
    def bind_layers(self, layers):
        raise RuntimeError("it has no clock")


class LoadsNothing(Sums):
    """It puts loads around those of a layer, and forgets to call them."""

    @hookimpl
    def bind_layers(self, layers):
        for path in layers:
            path.loads = Unloaded(path)


class Unloaded(Loads):
    """Loads of a layer that are planned and never done."""

    def load(self, plan):
        """Do nothing."""


def _mutant(broken: type, test: str) -> Mutant:
    clean, entry = (
        PluginEntry(cls.__name__.lower(), "observer", f"{__name__}:{cls.__name__}")
        for cls in (Sums, broken)
    )
    name = f"test_{test}"
    return Mutant(name_of(broken), ObserverTests, name, entry, clean, options=OPTIONS)


MUTANTS = [
    _mutant(CountsTooEarly, "it_gathers_what_forwards_were"),
    _mutant(NeedsARow, "forwards_are_the_same_without_it"),
    _mutant(CannotBind, "it_gathers_what_forwards_were"),
    _mutant(LoadsNothing, "forwards_are_the_same_without_it"),
    _mutant(SharesItsSums, "each_coordinator_has_its_own"),
]
