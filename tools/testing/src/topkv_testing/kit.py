"""Parts of every suite of the conformance kit: a subject, a tier, and a guard.

A plugin subclasses a suite and says which entry it is about::

    class TestQuest(AlgorithmTests):
        @pytest.fixture
        def plugin(self):
            return "quest"

Every test of a suite takes ``subject`` alone, so that it can also be called as a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import pytest
from attrs import field, frozen
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from topkv.assembly.stages import Stages
from topkv.checks import Refused
from topkv.entries import PluginEntry
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.stage import StageSetup
from topkv.parameters import make
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv_testing.models.doubles import Entries
from topkv_testing.models.stage_doubles import Offered
from topkv_testing.tiers import Tier

Data = st.DataObject


def params_of(entry: PluginEntry, given: Mapping[str, Any]) -> Any:
    """Make the parameters of an entry; raise ConfigError with every reason against them."""
    try:
        return make(entry.parameters, given, entry.name)
    except Refused as error:
        raise ConfigError(CONFIG_REFUSED, error.reasons) from error


@frozen
class Subject:
    """A plugin on a tier.

    Attributes:
        entry: what the plugin package registered.
        registry: where ``entry`` is found, beside the doubles ``scripted`` and ``gather``.
        tier: where it runs.
        options: options that an author gives the suite, see the suite.
        found: what a suite has found out about the plugin, kept for its other tests.
    """

    entry: PluginEntry
    registry: PluginRegistry
    tier: Tier
    options: Any = None
    found: dict[str, Any] = field(factory=dict, eq=False, repr=False)

    def params(self, given: Mapping[str, Any]) -> Any:
        """Make the parameters of the entry; raise ConfigError with every reason against them."""
        return params_of(self.entry, given)

    def make(self, setup: object, impl: str | None = None) -> Any:
        """Make an instance and check it as the core does; by default the tier's implementation."""
        impl = impl or self.tier.impl
        return self.registry.create(self.entry.kind, self.entry.name, setup, impl)

    def require(self, trait: str) -> None:
        """Skip the test unless the entry states the trait."""
        if trait not in self.entry.capabilities.traits:
            pytest.skip(f"{self.entry.name} does not state the trait {trait!r}")


class StageSubject(Subject):
    """A stage on a tier. ``make`` gives an algorithm with the stage behind it, as the core has
    it, so that all that holds for algorithms is tested of the two together."""

    def make(self, setup: Any, impl: str | None = None) -> Any:
        """Make ``Staged`` for an ``AlgorithmSetup``: candidates of ``Offered``, and the stage."""
        stages = Stages(setup.group, setup.device)
        sizes = setup.device, setup.max_queries
        own = StageSetup(setup.model, setup.group, setup.params, *sizes)
        stages.put_first(super().make(own, impl), 0)
        offered: Any = Offered(stages.group)
        return stages.behind(offered)


def subject_of(plugin: str | PluginEntry, kind: str, tier: Tier, options: Any = None) -> Subject:
    """Make the subject of an installed plugin, by name, or of an entry that is not installed.

    Args:
        plugin: name or entry.
        kind: what the suite is about.
        tier: where to run it; skips where the tier is missing or the entry does not state it.
        options: see the suite.

    Raises:
        PluginError: the entry is wrong, with every reason.
    """
    found = plugin if isinstance(plugin, PluginEntry) else default_registry().get(kind, plugin)
    entry = found if isinstance(found, PluginEntry) else found.entry
    assert entry is not None  # get() returns usable records
    if entry.kind != kind:
        raise ValueError(f"this suite tests a plugin of kind {kind!r}, got {entry.kind!r}")
    # The core's own stand in every registry already.
    further = () if entry in [own.entry for own in PluginRegistry([]).records()] else (entry,)
    registry = PluginRegistry([("topkv-testing", "0", Entries(*further))])
    registry.get(kind, entry.name)  # before anything that it states is believed
    if tier.name not in entry.capabilities.tiers or tier.impl not in entry.impls:
        pytest.skip(f"{entry.name} does not state the tier {tier.name!r}")
    if tier.missing:
        pytest.skip(f"tier {tier.name!r}: {tier.missing}")
    made = StageSubject if kind == "stage" else Subject
    return made(entry, registry, tier, options)


class KitTests:
    """Base of the suites. A test of the kit can be overridden only to mark it as a known failure.

    Attributes:
        kind: kind of plugin that the suite is about.
    """

    kind: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            inherited = any(name in vars(base) for base in cls.__mro__[1:])
            if name.startswith("test") and inherited and not _known_failure(value):
                raise TypeError(
                    f"{cls.__name__}.{name} overrides a test of the conformance kit; give your "
                    "test another name, or mark it @pytest.mark.xfail(reason=..., strict=True)"
                )

    @pytest.fixture
    def plugin(self) -> str | PluginEntry:
        """The name that the plugin registered, or its entry. To be overridden."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'plugin'")

    @pytest.fixture
    def options(self) -> Any:
        """Options of the suite, which the entry does not state; see the suite."""
        return None

    @pytest.fixture
    def subject(self, plugin: str | PluginEntry, options: Any, tier: Tier) -> Subject:
        """The plugin under test on one tier."""
        return subject_of(plugin, self.kind, tier, options)


def _known_failure(test: Any) -> bool:
    marks = getattr(test, "pytestmark", [])
    return any(
        mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason")
        for mark in marks
    )


def examples(tier: Tier, cpu: int, interpret: int, gpu: int | None = None) -> settings:
    """Hypothesis settings of a test whose examples cost differently from tier to tier.

    A failure of kernels is reported as it was found: to shrink it takes hundreds of calls, each of
    them interpreted or compiled for another shape.

    Args:
        tier: where the test runs.
        cpu, interpret, gpu: examples under a profile with hypothesis' own 100 examples; the
            current profile scales them, and 0 is one under any. ``gpu`` is ``cpu`` unless given.
    """
    counts = {"cpu": cpu, "interpret": interpret, "gpu": cpu if gpu is None else gpu}
    profile = settings()
    count = counts[tier.name] * profile.max_examples // 100
    long = () if tier.impl == "reference" else (Phase.shrink, Phase.explain)
    phases = [phase for phase in profile.phases if phase not in long]
    return settings(max_examples=max(1, count), deadline=None, phases=phases)


def drawn(
    cpu: int,
    interpret: int,
    gpu: int | None = None,
    *,
    traits: Sequence[str] = (),
    needs: Sequence[Callable[[Subject], object]] = (),
    **strategies: Any,
) -> Callable[[Callable[..., None]], Callable[[Any, Subject], None]]:
    """Make a test of a suite, which takes ``subject`` alone, of one that takes drawn values too.

    Args:
        cpu, interpret, gpu: as of ``examples``.
        traits: those that the entry has to state; else the test is skipped.
        needs: called with the subject before anything is drawn; they skip what does not suit.
        strategies: those of the further arguments by name, or functions that make them for a
            subject. An argument ``data`` needs none.
    """

    def decorate(test: Callable[..., None]) -> Callable[[Any, Subject], None]:
        own, subject_, *further = inspect.signature(test).parameters.values()

        @wraps(test)
        def run(self: Any, subject: Subject) -> None:
            for trait in traits:
                subject.require(trait)
            for need in needs:
                need(subject)
            chosen = {"data": st.data()} if "data" in [each.name for each in further] else {}
            for name, strategy in strategies.items():
                chosen[name] = strategy(subject) if callable(strategy) else strategy
            few = examples(subject.tier, cpu, interpret, gpu)
            few(given(**chosen)(test))(self, subject)

        # pytest and authors see what they call, and not what is drawn.
        vars(run)["__signature__"] = inspect.Signature([own, subject_])
        return run

    return decorate
