"""A mutant is a plugin with one bug, the test of the kit that must see it, and its clean twin."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve, field, frozen
from hypothesis import Phase, settings

from topkv.entries import PluginEntry
from topkv.errors import PluginError
from topkv_testing.kit import KitTests, subject_of
from topkv_testing.tiers import tier


@contextmanager
def without_shrinking(count: int = 100) -> Iterator[None]:
    """Draw ``count`` examples and stop at the first failure, which is not shrunk."""
    current = settings.get_current_profile_name()
    settings.register_profile(
        "mutants",
        settings(),
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        max_examples=count,
    )
    settings.load_profile("mutants")
    try:
        yield
    finally:
        settings.load_profile(current)


def name_of(broken: Any) -> str:
    """Make the name of a mutant from the first line of its docstring."""
    first = broken.__doc__.strip().splitlines()[0].rstrip(".")
    return first[0].lower() + first[1:]


def mutated(clean: PluginEntry, broken: type, kernels: type | None = None) -> PluginEntry:
    """Make the entry of a mutant, whose bug all implementations share if it is in the reference.

    Args:
        clean: entry of the plugin without the bug.
        broken: a subclass of the reference, or of the class with the kernels for a bug of theirs.
        kernels: the class with the kernels, which gets the bug on top; None if there is none, or
            if ``broken`` serves for both.
    """
    path = f"{broken.__module__}:{broken.__name__}"
    if kernels is None:
        return evolve(clean, name="mutant", factories=dict.fromkeys(clean.impls, path))
    if issubclass(broken, kernels):
        return evolve(clean, name="mutant", factories={**clean.factories, "triton": path})
    both = type(f"{broken.__name__}Triton", (broken, kernels), {"__module__": broken.__module__})
    setattr(sys.modules[broken.__module__], both.__name__, both)
    factories = {"reference": path, "triton": f"{both.__module__}:{both.__name__}"}
    return evolve(clean, name="mutant", factories=factories)


@frozen
class Mutant:
    """One deliberate bug.

    Attributes:
        name: the bug in a few words.
        suite: suite of the kit.
        test: name of the test that must fail.
        broken: entry of the broken plugin.
        clean: entry of the plugin without the bug, which must pass the same test.
        tiers: where the bug can be seen.
        options: options of the suite.
    """

    name: str
    suite: type[KitTests]
    test: str
    broken: PluginEntry
    clean: PluginEntry
    tiers: Sequence[str] = ("cpu",)
    options: Any = field(default=None)

    def run(self, entry: PluginEntry, tier_name: str) -> None:
        """Run the test on ``broken`` or ``clean``, as a plain function."""
        subject = subject_of(entry, self.suite.kind, tier(tier_name), self.options)
        getattr(self.suite(), self.test)(subject)

    @property
    def twin(self) -> Hashable:
        """Key of what ``run_clean`` runs, which all mutants of one test share."""
        return (self.suite, self.test, self.clean.name, id(self.options))

    def run_clean(self, tier_name: str) -> None:
        """Run the test on the clean twin; raise what the test raises.

        A few examples show that the test does not fail of itself: the twin's own suite draws more.
        """
        with without_shrinking(10):
            self.run(self.clean, tier_name)

    def is_caught(self, tier_name: str) -> str | None:
        """Return the failure that the kit reports, or None if the mutant survives.

        A skip counts as survival: a test that does not run sees nothing.
        """
        try:
            with without_shrinking():
                self.run(self.broken, tier_name)
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"{self.name}: the test was skipped: {skipped}") from None
        except (PluginError, AttributeError, NameError, TypeError):
            raise  # the mutant does not load or run at all, so nothing has seen its bug
        except Exception as failure:
            text = (str(failure).splitlines() or ["no message"])[0]
            return f"{type(failure).__name__}: {text[:160]}"
        return None
