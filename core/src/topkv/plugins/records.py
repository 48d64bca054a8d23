"""Records of plugins: each package is asked for its entries, and each answer becomes a record.

That imports the light entry modules only, neither torch nor triton. Whatever fails on the way
becomes a record with a problem, and never breaks another package, hook or entry.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TextIO

import pluggy
from attrs import evolve, frozen

from topkv.entries import HOOK_API, PluginEntry
from topkv.messages import raised
from topkv.plugins import builtin, entry_checks
from topkv.plugins.discovery import hookspec
from topkv.plugins.kinds import kinds, registering
from topkv.version import VERSION

GROUP = "topkv"
BLOCK = "TOPKV_BLOCK"
MIGRATION = "; the page 'To hook API 3' of the documentation says what to change"


@hookspec
def _entries_of_a_kind() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Every hook by which entries are returned: they differ in their names."""


FAILURES = (Exception, SystemExit)
"""Exceptions that mean a broken plugin. An exit does; an interrupt is the user's."""


@frozen
class PluginRecord:
    """One thing that a package offers, or the reason why it offers nothing.

    Attributes:
        entry: None if it did not load.
        name: the entry's name; that of the entry point if it has none.
        kind: None if it did not load.
        package: distribution that it comes from.
        version: of the distribution.
        problem: why it cannot be used and how to fix it; None if it can.
        point: ``"package:entry point"`` that it comes from, as ``TOPKV_BLOCK`` names it.
    """

    entry: PluginEntry | None
    name: str
    kind: str | None
    package: str
    version: str
    problem: str | None = None
    point: str = ""

    @property
    def label(self) -> str:
        """Kind and name, for messages."""
        return f"{self.kind or 'plugin'} {self.name!r}"

    @property
    def who(self) -> str:
        """Package, version, kind and name, for messages."""
        return f"{self.package} {self.version} ({self.label})"

    def broken(self, why: str) -> PluginRecord:
        """Return this record with a problem that only the author of the package can fix."""
        fix = f"this is for the author of {self.package} to fix"
        return evolve(self, problem=f"{why}; {fix}")


def installed() -> list[tuple[str, str, EntryPoint]]:
    """Distribution, version and entry point of all that is installed, by name."""
    offers = []
    for point in entry_points(group=GROUP):
        # A package whose metadata is damaged may lack both.
        package = (point.dist and point.dist.name) or "unknown"
        version = (point.dist and point.dist.version) or "unknown"
        offers.append((package, version, point))
    return sorted(offers, key=lambda offer: (offer[0], offer[2].name))


def aside() -> redirect_stdout[TextIO]:
    """Send the prints of a package to stderr while it loads: stdout may be JSON that somebody
    reads.
    """
    return redirect_stdout(sys.stderr)


def blocked(package: str, name: str) -> bool:
    """Return True if ``TOPKV_BLOCK`` names an entry point, as ``point`` or ``package:point``."""
    words = {word.strip() for word in os.environ.get(BLOCK, "").split(",")}
    return name in words or f"{package}:{name}" in words


def records_of(package: str, version: str, source: object) -> list[PluginRecord]:
    """All that a package offers, or the one reason why it offers nothing.

    Args:
        package, version: of the distribution.
        source: a module or object with topkv_register_* hooks, or the entry point that leads to
            it. One that ``TOPKV_BLOCK`` names is not loaded.
    """
    name = source.name if isinstance(source, EntryPoint) else package.removeprefix("topkv-")
    # All records of the package begin as this one.
    offer = PluginRecord(None, name, None, package, version, point=f"{package}:{name}")
    if isinstance(source, EntryPoint) and blocked(package, name):
        problem = f"left out by the environment variable {BLOCK}; take it out of the list"
        return [evolve(offer, problem=problem)]
    with aside():
        try:
            plugin = source.load() if isinstance(source, EntryPoint) else source
        except FAILURES as error:
            problem = f"entry point {name!r} does not import: {raised(error)}"
            fix = f"reinstall {package} or uninstall it"
            return [evolve(offer, problem=f"{problem}; {fix}")]
        # One for each package: what another offers, be it the same object, changes nothing.
        manager = pluggy.PluginManager(GROUP)
        hooks = {kind: registering(kind) for kind in kinds()}
        specs = dict.fromkeys(hooks.values(), _entries_of_a_kind)
        manager.add_hookspecs(type("Hooks", (), specs))
        try:
            manager.register(plugin)
            manager.check_pending()
        except FAILURES as error:
            return [offer.broken(f"its hooks are wrong: {raised(error)}")]
        asked = [
            (kind, impl.function)
            for kind, hook in hooks.items()
            for impl in getattr(manager.hook, hook).get_hookimpls()
        ]
        if not asked:
            return [offer.broken(f"it implements none of {', '.join(hooks.values())}")]
        return [record for kind, hook in asked for record in _entries(offer, kind, hook)]


def _entries(offer: PluginRecord, kind: str, hook: Callable[[], Any]) -> list[PluginRecord]:
    """The records of what one hook returns."""
    offer = evolve(offer, kind=kind)
    try:
        entries = list(hook())
    except FAILURES as error:
        # A TypeError may come of an argument that entries had once.
        page = MIGRATION if isinstance(error, TypeError) else ""
        return [offer.broken(f"{registering(kind)} failed: {raised(error)}{page}")]
    return [_entry(offer, kind, entry) for entry in entries]


def _entry(offer: PluginRecord, kind: str, entry: object) -> PluginRecord:
    """The record of an entry, which is judged before its factory is imported."""
    hook = registering(kind)
    if not isinstance(entry, PluginEntry):
        return offer.broken(
            f"{hook} must return a list of PluginEntry, got {type(entry).__name__}"
        )
    try:
        wrong = entry_checks.reasons(entry, kind, hook)
        other_api = _other_api(offer, entry.hook_api)
        named = evolve(offer, name=entry.name) if entry_checks.is_name(entry.name) else offer
    except FAILURES as error:
        return offer.broken(f"an entry of {hook} cannot be read: {raised(error)}")
    # An entry for another core may look wrong to this one for that reason alone.
    if wrong and not other_api:
        return named.broken("; ".join(wrong))
    return evolve(named, entry=None if wrong else entry, problem=other_api)


def _other_api(offer: PluginRecord, api: tuple[int, int]) -> str | None:
    """Why this core does not speak the hook API of an entry, if it has the form of one."""
    if not entry_checks.is_api(api) or (api[0] == HOOK_API[0] and api[1] <= HOOK_API[1]):
        return None
    stated, spoken = (".".join(map(str, version)) for version in (api, HOOK_API))
    core = f"a topkv that speaks {stated}"
    plugin = f"{offer.package} that implements {HOOK_API[0]}.x with x <= {HOOK_API[1]}"
    if api > HOOK_API:
        fix = f"{core}, or an older {plugin}"
    else:
        fix = f"a newer {plugin}, or {core}{MIGRATION}"
    return (
        f"{offer.package} {offer.version} (entry point {offer.name!r}) implements hook API "
        f"{stated}; this topkv {VERSION} speaks {spoken}. Install {fix}"
    )


def find(packages: Iterable[tuple[str, str, object]]) -> list[PluginRecord]:
    """All that the core and packages offer, by kind, name and package.

    A name that is not a package's alone is a problem. Two packages that offer one name are both
    refused: to prefer either would let a package put its code where a user asked for another's.
    Names of the core stay the core's.

    Args:
        packages: the arguments of ``records_of`` for each package.
    """
    own = records_of("topkv", VERSION, builtin)
    found = [
        record
        for package, version, source in packages
        for record in records_of(package, version, source)
    ]
    records = [*own, *(_settled(record, own, found) for record in found)]
    return sorted(records, key=lambda record: (record.kind or "", record.name, record.package))


def _settled(
    record: PluginRecord, own: Sequence[PluginRecord], found: Sequence[PluginRecord]
) -> PluginRecord:
    """A record, with a problem if the core or another usable record has its name."""
    label = record.label
    if record.problem:
        return record
    if any(each.label == label for each in own):
        problem = (
            f"the name is topkv's own, which offers {label} itself; uninstall "
            f"{record.package}, or have its author choose another name"
        )
        return evolve(record, problem=problem)
    offers = [other for other in found if other.label == label and not other.problem]
    if len(offers) == 1:
        return record
    strangers = {other.point: other for other in offers if other.point != record.point}
    if not strangers:
        return record.broken(f"{record.package} {record.version} offers {label} twice")
    offered = " and ".join(f"{other.package} {other.version}" for other in strangers.values())
    packages = " and ".join(dict.fromkeys(other.package for other in strangers.values()))
    problem = (
        f"the name is taken: {label} is offered by {offered} too, and none of them is used; to "
        f"use this one, uninstall {packages}, or add {','.join(strangers)} to {BLOCK}"
    )
    return evolve(record, problem=problem)
