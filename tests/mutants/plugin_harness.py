"""Mutants of plugins, caught by the kit or by the plugin's own tests."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import pytest
from attrs import frozen

from tests.mutants.harness import Mutant, mutated, name_of, without_shrinking
from topkv.errors import ConfigError, PluginError
from topkv.plugins import registry
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.kit import subject_of
from topkv_testing.stages import StageTests
from topkv_testing.tiers import Tier, tier


@frozen
class OwnMutant:
    """One deliberate bug, and a test beside the kit.

    Attributes:
        broken: a subclass of the algorithm, which takes its place while the test runs.
        kernels: the algorithm's class with the kernels, which gets the bug on top.
        module, test: a function of the plugin's tests.
        fixtures: fixtures of the test by name, made from the tier.
        given: further arguments, of tests that are parametrized.
        tiers: where the bug can be seen.
    """

    broken: type
    kernels: type
    module: ModuleType
    test: str
    fixtures: dict[str, Callable[[Tier], Any]]
    given: dict[str, Hashable]
    tiers: tuple[str, ...] = ("cpu",)

    @property
    def name(self) -> str:
        """The bug in a few words."""
        return name_of(self.broken)

    @property
    def twin(self) -> Hashable:
        """Key of what ``run_clean`` runs, which all mutants of one test share."""
        return (self.module.__name__, self.test, frozenset(self.given.items()))

    def run_clean(self, tier_name: str) -> None:
        """Run the test on the plugin as it is; raise what the test raises."""
        test = getattr(self.module, self.test)
        on = tier(tier_name)
        with pytest.MonkeyPatch.context() as patch:
            made = {"tier": lambda on: on, "on": lambda on: on, "monkeypatch": lambda on: patch}
            made |= self.fixtures
            wanted = [name for name in inspect.signature(test).parameters if name in made]
            test(**{name: made[name](on) for name in wanted}, **self.given)

    def is_caught(self, tier_name: str) -> str | None:
        """Return the failure that the test reports, or None if the mutant survives."""
        whole = next(base for base in self.broken.__mro__ if base.__module__.startswith("topkv_"))
        with pytest.MonkeyPatch.context() as patch, without_shrinking():
            _replace(patch, whole, self.broken)
            if issubclass(self.kernels, whole) and self.kernels is not whole:
                both = type(f"{self.broken.__name__}Triton", (self.broken, self.kernels), {})
                _replace(patch, self.kernels, both)
            try:
                self.run_clean(tier_name)
            except pytest.skip.Exception as skipped:
                raise AssertionError(f"{self.name}: the test was skipped: {skipped}") from None
            except (ConfigError, PluginError, AttributeError, NameError, TypeError):
                raise  # the mutant does not load or run at all, so nothing has seen its bug
            except (Exception, pytest.fail.Exception) as failure:
                text = (str(failure).splitlines() or ["no message"])[0]
                return f"{type(failure).__name__}: {text[:160]}"
        return None


def _replace(patch: pytest.MonkeyPatch, whole: type, broken: type) -> None:
    """Put a class in the place of another, in every module of its package that has it."""
    package = whole.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and vars(module).get(whole.__name__) is whole:
            patch.setattr(module, whole.__name__, broken)


def _kit(name: str, kernels: type, options: AlgorithmOptions) -> Callable[..., Mutant]:
    """Make mutants of one plugin that the kit catches, set up as the plugin's own run is."""
    clean = registry().get("algorithm", name).entry

    def made(
        broken: type,
        test: str,
        tiers: tuple[str, ...] = ("cpu",),
        suite: type[AlgorithmTests] = AlgorithmTests,
    ) -> Mutant:
        entry = mutated(clean, broken, kernels)
        return Mutant(name_of(broken), suite, f"test_{test}", entry, clean, tiers, options)

    return made


def _own(kernels: type, **fixtures: Callable[[Tier], Any]) -> Callable[..., OwnMutant]:
    """Make mutants of one plugin that its own tests catch."""

    def made(
        broken: type,
        module: ModuleType,
        test: str,
        tiers: tuple[str, ...] = ("cpu",),
        **given: Hashable,
    ) -> OwnMutant:
        return OwnMutant(broken, kernels, module, f"test_{test}", fixtures, given, tiers)

    return made


def _subject(name: str, options: AlgorithmOptions) -> Callable[[Tier], Any]:
    return lambda on: subject_of(name, "algorithm", on, options)


def _stage(
    broken: type, kernels: type, kit: ModuleType, test: str, tiers: tuple[str, ...]
) -> Mutant:
    """Make a mutant of a stage that the kit catches."""
    entry = mutated(kit.ENTRY, broken, kernels)
    reported = name_of(broken)
    return Mutant(reported, StageTests, f"test_{test}", entry, kit.ENTRY, tiers, kit.OPTIONS)
