"""Where values come from: topkv defaults < plugin < checkpoint < user, origins kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, frozen

from topkv.config.checks import clean
from topkv.config.settings import CHECKS, DEFAULTS
from topkv.discovery import PluginRecord
from topkv.entries import Capabilities
from topkv.errors import PluginError
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


@frozen
class Source:
    """Values of one origin, in lowered form."""

    origin: str
    values: Mapping[str, Any]


@frozen
class Sources:
    """Sources from the strongest to the weakest; below all of them stand topkv's defaults."""

    stack: tuple[Source, ...]

    def over(self, source: Source) -> Sources:
        """The same with a stronger source."""
        return Sources((source, *self.stack))

    def under(self, source: Source) -> Sources:
        """The same with a weaker source."""
        return Sources((*self.stack, source))

    def find(self, name: str) -> Setting | None:
        for source in self.stack:
            if name in source.values:
                return Setting(name, source.values[name], source.origin)
        return None

    def get(self, name: str, default: Any = None, origin: str = DEFAULT) -> Setting:
        """What the strongest source says; else ``default``, or the setting's own if it is None."""
        value = DEFAULTS[name] if default is None else default
        return self.find(name) or Setting(name, value, origin)


@define
class Lookup:
    """Looks plugins up, and gathers why they cannot be had; a reason may come more than once."""

    registry: PluginRegistry
    reasons: list[str]

    def get(self, kind: str, name: str | None) -> PluginRecord | None:
        try:
            return None if name is None else self.registry.get(kind, name)
        except PluginError as error:
            head = str(error).split("\n", 1)[0]
            self.reasons += [f"{head} {reason}" for reason in error.reasons]
            return None

    def choose(self, kind: str, sources: Sources) -> Setting | None:
        """What was asked for, else the only one that is installed."""
        found = sources.find(kind)
        if found is not None:
            return found
        usable = [record.name for record in self.registry.usable(kind)]
        # One that is refused is installed too: without it another must not become the only one.
        known = {r.name for r in self.registry.records() if r.kind == kind and r.entry}
        if len(usable) == len(known) == 1:
            return Setting(kind, usable[0], ONLY)
        # The registry knows what failed to load, and how to mend it.
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

    def defaults(self, kind: str, name: str | None) -> Source:
        """The defaults of a plugin and its version; nothing where it cannot be had."""
        record = self.get(kind, name)
        if record is None or record.entry is None:
            return Source(DEFAULT, {})
        where = f"defaults of {record.who}: "
        values = clean(record.entry.defaults, CHECKS, self.reasons, where)
        return Source(f"{record.package} {record.version}", values)

    def capabilities(self, kind: str, name: str | None) -> Capabilities:
        """Those of a plugin; the usual ones where it cannot be had."""
        record = self.get(kind, name)
        return record.entry.capabilities if record and record.entry else Capabilities()

    def parameters(self, kind: str, name: str | None) -> Mapping[str, Any]:
        record = self.get(kind, name)
        return record.entry.parameters if record and record.entry else {}
