"""What was found, before anybody asks for it: offers of packages, and the records they become."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from typing import TextIO

from attrs import frozen

import topkv
from topkv.entries import HOOK_API, Capabilities, PluginEntry

GROUP = "topkv"


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
    """

    entry: PluginEntry | None
    name: str
    kind: str | None
    package: str
    version: str
    problem: str | None = None

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

    def load(self) -> object:
        return self.source.load() if isinstance(self.source, EntryPoint) else self.source

    def record(self, problem: str, kind: str | None = None, name: str = "") -> PluginRecord:
        return PluginRecord(None, name or self.name, kind, self.package, self.version, problem)


def installed() -> list[Offer]:
    offers = []
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist else "unknown"
        version = point.dist.version if point.dist else "unknown"
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


def _api(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def entry_problem(entry: PluginEntry, offer: Offer) -> str | None:
    """Why an entry cannot be used, judged before its factory is imported."""
    api = entry.hook_api
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        return f"hook_api must be a tuple (major, minor) of ints, got {api!r}; {author(offer)}"
    if not isinstance(entry.capabilities, Capabilities):
        got = type(entry.capabilities).__name__
        return f"capabilities must be a topkv.entries.Capabilities, got {got}; {author(offer)}"
    if api[0] == HOOK_API[0] and api[1] <= HOOK_API[1]:
        return None
    newer = api > HOOK_API
    core = f"a topkv that speaks {_api(api)}"
    plugin = f"{'an older' if newer else 'a newer'} {offer.package} that implements "
    plugin += f"{HOOK_API[0]}.x with x <= {HOOK_API[1]}"
    return (
        f"{offer.package} {offer.version} (entry point {offer.name!r}) implements hook API "
        f"{_api(api)}; this topkv {topkv.__version__} speaks {_api(HOOK_API)}. Install "
        f"{f'{core}, or {plugin}' if newer else f'{plugin}, or {core}'}"
    )


def author(offer: Offer) -> str:
    return f"this is for the author of {offer.package} to mend"
