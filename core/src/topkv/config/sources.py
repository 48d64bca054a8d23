"""Sources of values: topkv defaults < plugin < checkpoint < user; each value keeps its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Factory, define, evolve, field, frozen

from topkv.checks import Refused, clean
from topkv.config.settings import CHECKS, DEFAULTS
from topkv.config.stages import N
from topkv.entries import Capabilities, NoParameters, PluginEntry
from topkv.errors import PluginError
from topkv.parameters import make
from topkv.plugins import PluginRegistry

DEFAULT = "topkv default"
COMPUTED = "computed"
ONLY = "only one installed"


@frozen
class Setting:
    """One value and where it came from, for people to read."""

    name: str
    value: Any
    origin: str


Sources = Mapping[str, Setting]
"""Settings by name; of several sources, the strongest. Below them stand topkv's defaults."""


def with_origin(origin: str, values: Mapping[str, Any]) -> Sources:
    """The values of one origin; parameters one by one, as ``params.NAME``, for they are merged."""
    single = {name: value for name, value in values.items() if name != "params"}
    single |= {f"params.{name}": value for name, value in values.get("params", {}).items()}
    return {name: Setting(name, value, origin) for name, value in single.items()}


def pick(sources: Sources, name: str, default: Any = None, origin: str = DEFAULT) -> Setting:
    """The setting ``name`` of the sources; if they have none, ``default``, or topkv's own default
    where that is None.
    """
    value = DEFAULTS[name] if default is None else default
    return sources.get(name) or Setting(name, value, origin)


@frozen
class Plugin:
    """A plugin as lowering uses it. Without an entry it has the usual capabilities, so that the
    checks go on and further reasons are found.

    Attributes:
        entry: None where it cannot be had.
        who: whose it is, for messages.
        origin: package and version.
        defaults: of the entry, in lowered form.
    """

    entry: PluginEntry | None = None
    who: str = ""
    origin: str = DEFAULT
    defaults: Sources = field(factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        return self.entry.capabilities if self.entry else Capabilities()


@define
class Resolver:
    """Resolves settings and plugins, one by one, and keeps each setting with its origin.

    Attributes:
        registry: where plugins are looked up.
        reasons: why something is refused; one may come more than once.
        written: by the user, above what the checkpoint recommends.
        sources: what was written, above the defaults of each plugin that is used.
        settings: what was resolved, by name, in the order in which it is shown.
    """

    registry: PluginRegistry
    reasons: list[str]
    written: Sources
    sources: Sources = Factory(lambda resolver: resolver.written, takes_self=True)
    settings: dict[str, Setting] = field(factory=dict)

    def set(self, name: str, default: Any = None, origin: str = DEFAULT) -> Any:
        """Resolve and keep a setting."""
        return self.keep(pick(self.sources, name, default, origin))

    def keep(self, setting: Setting) -> Any:
        self.settings[setting.name] = setting
        return setting.value

    def plugin(self, kind: str, name: str | None) -> Plugin:
        """A plugin by its name, if it has one; why it cannot be had goes to the reasons."""
        try:
            record = None if name is None else self.registry.get(kind, name)
        except PluginError as error:
            head = str(error).split("\n", 1)[0]
            self.reasons += [f"{head} {reason}" for reason in error.reasons]
            return Plugin()
        if record is None or record.entry is None:
            return Plugin()
        where, origin = f"defaults of {record.who}: ", f"{record.package} {record.version}"
        defaults = with_origin(origin, clean(record.entry.defaults, CHECKS, self.reasons, where))
        return Plugin(record.entry, record.who, origin, defaults)

    def params(self, plugin: Plugin, given: Mapping[str, Any], where: str) -> Any:
        """The parameters of a plugin; those that are refused have their defaults.

        Args:
            where: ends the reasons.
        """
        if plugin.entry is None:
            return NoParameters()
        try:
            return make(plugin.entry.parameters, given, plugin.who)
        except Refused as error:
            self.reasons += [f"{reason} {where}".rstrip() for reason in error.reasons]
            return error.good

    def named(self, kind: str, asked: N, where: str) -> tuple[Plugin, N]:
        """A plugin that a setting names, and the setting with all parameters of it."""
        plugin = self.plugin(kind, asked.name)
        return plugin, evolve(asked, params=self.params(plugin, asked.params or {}, where))

    def under(self, defaults: Sources) -> None:
        """Let defaults hold from here on, wherever no stronger source says anything."""
        self.sources = {**defaults, **self.sources}

    def choose(self, kind: str) -> Setting | None:
        """The plugin that was asked for, else the only one that is installed."""
        if kind in self.sources:
            return self.sources[kind]
        usable = [record.name for record in self.registry.usable(kind)]
        # One that is refused is installed too: without it another must not become the only one.
        known = {r.name for r in self.registry.records() if r.kind == kind and r.entry}
        if len(usable) == len(known) == 1:
            return Setting(kind, usable[0], ONLY)
        # The registry knows what failed to load, and how to fix it.
        broken = "".join(f"; did not load: {why}" for why in self.registry.failed(kind))
        if len(known) > 1:
            names = ", ".join(sorted(known))
            self.reasons.append(f"{kind} is not set and several are installed: {names}{broken}")
        else:
            self.reasons.append(
                f"{kind} is not set and none is installed that can be used; the documentation "
                f"lists packages under Plugins{broken}"
            )
        return None

    def use(self, kind: str, choice: Setting | None) -> str | None:
        """Keep the choice of a plugin; from here on its defaults hold."""
        if choice is None:
            return None
        plugin = self.plugin(kind, choice.value)
        if plugin.entry is None and kind in self.sources and kind not in self.written:
            self.reasons.append(
                f"{choice.origin} asks for {kind} {choice.value!r}: reinstall it with what it "
                f"depends on, or set {kind}"
            )
        self.under(plugin.defaults)
        name: str = self.keep(choice)
        return name
