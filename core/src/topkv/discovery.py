"""What was found, before anybody asks for it: offers of packages, and the records they become."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from typing import TextIO

from attrs import evolve, frozen

import topkv
from topkv import entry_checks
from topkv.entries import HOOK_API, PluginEntry

GROUP = "topkv"
MIGRATION = "; the page 'From hook API 1 to 2' of the documentation says what to change"
BLOCK = "TOPKV_BLOCK"


@frozen
class PluginRecord:
    """One thing that a package offers, or the reason why it offers nothing.

    Attributes:
        entry: None if it did not load.
        name: the entry's name; that of the entry point if it did not load.
        kind: None if it did not load.
        package: distribution that it comes from.
        version: of the distribution.
        problem: why it cannot be used and how to mend it; None if it can.
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
    def who(self) -> str:
        """Whose it is, for messages."""
        return f"{self.package} {self.version} ({self.kind or 'plugin'} {self.name!r})"


@frozen
class Offer:
    """A plugin object that is about to be registered, or the entry point that leads to it."""

    package: str
    version: str
    name: str
    source: object

    @property
    def point(self) -> str:
        return f"{self.package}:{self.name}"

    def load(self) -> object:
        return self.source.load() if isinstance(self.source, EntryPoint) else self.source

    def record(self, problem: str, kind: str | None = None, name: str = "") -> PluginRecord:
        return PluginRecord(
            None, name or self.name, kind, self.package, self.version, problem, self.point
        )


def installed() -> list[Offer]:
    offers = []
    for point in entry_points(group=GROUP):
        # A package whose metadata is damaged may lack both.
        package = (point.dist and point.dist.name) or "unknown"
        version = (point.dist and point.dist.version) or "unknown"
        offers.append(Offer(package, version, point.name, point))
    return sorted(offers, key=lambda offer: (offer.package, offer.name))


def explicit(plugins: Iterable[tuple[str, str, object]]) -> list[Offer]:
    return [
        Offer(package, version, package.removeprefix("topkv-"), plugin)
        for package, version, plugin in plugins
    ]


def aside() -> redirect_stdout[TextIO]:
    """For code of a package: what it prints while it loads goes to stderr, for stdout may be JSON
    that somebody reads."""
    return redirect_stdout(sys.stderr)


def blocked(package: str, name: str) -> bool:
    """Whether ``TOPKV_BLOCK`` names an entry point, alone or behind its package and a colon."""
    words = {word.strip() for word in os.environ.get(BLOCK, "").split(",")}
    return name in words or f"{package}:{name}" in words


def refuse_taken(own: Iterable[PluginRecord], found: Sequence[PluginRecord]) -> list[PluginRecord]:
    """What packages offer, with a problem where a name is not theirs alone.

    Two packages that offer one name are both refused: to prefer either would let a package put
    its code where a user asked for another's. Names of the core stay the core's.

    Args:
        own: what the core offers.
        found: what packages do.
    """
    core = {(record.kind, record.name) for record in own}
    rivals: dict[tuple[str | None, str], list[PluginRecord]] = {}
    for record in found:
        if record.problem is None:
            rivals.setdefault((record.kind, record.name), []).append(record)
    settled = []
    for record in found:
        key, problem = (record.kind, record.name), record.problem
        what = f"{record.kind} {record.name!r}"
        others = [other for other in rivals.get(key, []) if other is not record]
        if problem is None and key in core:
            problem = (
                f"the name is topkv's own, which offers {what} itself; uninstall "
                f"{record.package}, or have its author choose another name"
            )
        elif problem is None and others:
            problem = _taken(record, what, others)
        settled.append(evolve(record, problem=problem))
    return settled


def _taken(record: PluginRecord, what: str, others: Sequence[PluginRecord]) -> str:
    strangers = {other.point: other for other in others if other.point != record.point}
    if not strangers:
        return f"{record.package} {record.version} offers {what} twice; {author(record)}"
    offered = " and ".join(f"{other.package} {other.version}" for other in strangers.values())
    packages = " and ".join(dict.fromkeys(other.package for other in strangers.values()))
    return (
        f"the name is taken: {what} is offered by {offered} too, and none of them is used; to use "
        f"this one, uninstall {packages}, or add {','.join(strangers)} to {BLOCK}"
    )


def _api(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def entry_record(entry: PluginEntry, kind: str, offer: Offer) -> PluginRecord:
    """The record of an entry, judged before its factory is imported."""
    wrong = entry_checks.reasons(entry)
    # What an entry for another core holds may look wrong to this one for that reason alone.
    problem = _api_problem(entry, offer)
    if wrong:
        return offer.record(problem or f"{'; '.join(wrong)}; {author(offer)}", kind)
    return PluginRecord(
        entry, entry.name, kind, offer.package, offer.version, problem, offer.point
    )


def _api_problem(entry: PluginEntry, offer: Offer) -> str | None:
    api = entry.hook_api
    if not entry_checks.is_api(api) or (api[0] == HOOK_API[0] and api[1] <= HOOK_API[1]):
        return None
    newer = api > HOOK_API
    core = f"a topkv that speaks {_api(api)}"
    plugin = f"{'an older' if newer else 'a newer'} {offer.package} that implements "
    plugin += f"{HOOK_API[0]}.x with x <= {HOOK_API[1]}"
    return (
        f"{offer.package} {offer.version} (entry point {offer.name!r}) implements hook API "
        f"{_api(api)}; this topkv {topkv.__version__} speaks {_api(HOOK_API)}. Install "
        f"{f'{core}, or {plugin}' if newer else f'{plugin}, or {core}'}"
        f"{'' if newer else MIGRATION}"
    )


def author(of: Offer | PluginRecord) -> str:
    return f"this is for the author of {of.package} to mend"
