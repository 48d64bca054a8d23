"""Discovery: which packages offer what, and why one of them cannot be used.

Listing imports the light entry modules only, neither torch nor triton. A plugin that fails is
kept as a record with its problem and never breaks the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import pluggy

import topkv
from topkv import builtin
from topkv.discovery import (
    BLOCK,
    GROUP,
    Offer,
    aside,
    author,
    blocked,
    entry_record,
    explicit,
    installed,
    refuse_taken,
)
from topkv.discovery import PluginRecord as PluginRecord
from topkv.entries import KINDS, PluginEntry
from topkv.errors import PluginError, TopkvError, is_out_of_memory
from topkv.hooks import registry as registry_specs
from topkv.hooks.binding import check_instance
from topkv.messages import close, shown

_KIND_OF_HOOK = {f"topkv_register_{kind}s": kind for kind in KINDS}


class PluginRegistry:
    """What is installed, by kind and name.

    Args:
        plugins: ``(distribution name, version, module or object with topkv_register_* hooks)``;
            by default the entry points of group ``topkv``, less those that ``TOPKV_BLOCK=a,b``
            names, as ``point`` or ``package:point``. The names of the core's own entries are
            taken; a name that two packages offer is used for neither.
    """

    def __init__(self, plugins: Sequence[tuple[str, str, object]] | None = None) -> None:
        self._records: list[PluginRecord] = []
        self._add(Offer("topkv", topkv.__version__, "topkv", builtin))
        own, self._records = self._records, []
        for offer in installed() if plugins is None else explicit(plugins):
            if plugins is None and blocked(offer.package, offer.name):
                problem = f"left out by the environment variable {BLOCK}; take it out of the list"
                self._records.append(offer.record(problem))
            else:
                with aside():
                    self._add(offer)
        self._records = [*own, *refuse_taken(own, self._records)]

    def _add(self, offer: Offer) -> None:
        try:
            plugin = offer.load()
        except (Exception, SystemExit) as error:
            self._records.append(
                offer.record(
                    f"entry point {offer.name!r} does not import: {_told(error)}; reinstall "
                    f"{offer.package} or uninstall it"
                )
            )
            return
        # One for each package: what another offers, be it the same object, changes nothing.
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(registry_specs)
        try:
            manager.register(plugin)
            manager.check_pending()
        except (Exception, SystemExit) as error:
            self._records.append(
                offer.record(f"its hooks are wrong: {_told(error)}; {author(offer)}")
            )
            return
        self._collect(manager, offer)

    def _collect(self, manager: pluggy.PluginManager, offer: Offer) -> None:
        """Ask one plugin for its entries: each hook alone, so that one cannot break another."""
        found = False
        for hook, kind in _KIND_OF_HOOK.items():
            for impl in getattr(manager.hook, hook).get_hookimpls():
                found = True
                try:
                    entries = list(impl.function())
                except (Exception, SystemExit) as error:
                    problem = f"{hook} failed: {_told(error)}; {author(offer)}"
                    self._records.append(offer.record(problem, kind))
                    continue
                self._records += [self._record(entry, kind, hook, offer) for entry in entries]
        if not found:
            problem = f"it implements none of {', '.join(_KIND_OF_HOOK)}; {author(offer)}"
            self._records.append(offer.record(problem))

    def _record(self, entry: object, kind: str, hook: str, offer: Offer) -> PluginRecord:
        if not isinstance(entry, PluginEntry):
            problem = f"{hook} must return a list of PluginEntry, got {type(entry).__name__}"
            return offer.record(f"{problem}; {author(offer)}", kind)
        try:
            record = entry_record(entry, kind, offer)
        except (Exception, SystemExit) as error:
            problem = f"an entry of {hook} cannot be read: {_told(error)}"
            return offer.record(f"{problem}; {author(offer)}", kind)
        if entry.kind == kind:
            return record
        problem = f"{hook} must return entries of kind {kind!r}, got {entry.kind!r}"
        return offer.record(f"{problem}; {author(offer)}", kind, record.name)

    def _usable(self, kind: str, name: str) -> PluginRecord | None:
        matches = (record for record in self.usable(kind) if record.name == name)
        return next(matches, None)

    def records(self) -> list[PluginRecord]:
        """Everything that was found, broken or not, by kind, name and package."""
        return sorted(
            self._records, key=lambda record: (record.kind or "", record.name, record.package)
        )

    def usable(self, kind: str) -> list[PluginRecord]:
        """Everything of a kind that can be used, by name."""
        usable = [record for record in self._records if record.kind == kind and not record.problem]
        return sorted(usable, key=lambda record: record.name)

    def get(self, kind: str, name: str) -> PluginRecord:
        """The record of a usable plugin.

        Raises:
            PluginError: nothing of that kind has that name, or it has a problem.
        """
        record = self._usable(kind, name)
        if record is not None:
            return record
        named = [
            record
            for record in self._records
            if record.problem and record.name == name and record.kind in (kind, None)
        ]
        if named:
            raise PluginError(f"{kind} {name!r} is installed and cannot be used", _told_of(named))
        raise PluginError(f"unknown {kind} {shown(name)}", self._unknown(kind, name))

    def _unknown(self, kind: str, name: str) -> list[str]:
        if kind not in KINDS:
            return [f"there is no kind {kind!r} of plugin; the kinds are {', '.join(KINDS)}"]
        names = [record.name for record in self.usable(kind)]
        meant = close(name, names)
        reason = (
            f"installed of kind {kind}: {', '.join(names) or 'none'}; {meant and meant + ' '}"
            "no installed package offers it, and the documentation lists packages under Plugins"
        )
        return [reason, *(f"did not load: {why}" for why in self.failed(kind))]

    def failed(self, kind: str) -> list[str]:
        """Whose plugins of a kind, or of one that is not known, cannot be used; and why."""
        return _told_of([r for r in self._records if r.problem and r.kind in (kind, None)])

    def create(self, kind: str, name: str, *args: Any) -> Any:
        """Import a factory, build an instance, and check it against the specs of its kind.

        Args:
            kind, name: what to build.
            args: what the factory takes; see the spec module of the kind.

        Raises:
            PluginError: it is unknown, does not import or build, or breaks its contract.
            TopkvError: whatever the factory refuses on purpose.
        """
        record = self.get(kind, name)
        assert record.entry is not None  # a record without an entry has a problem
        factory = self._import(record, record.entry.factory)
        try:
            with aside():
                instance = factory(*args)
        except TopkvError as error:
            error.add_note(f"raised by {record.who}")
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                error.add_note(f"raised by {record.who}")
                raise
            raise PluginError(f"{record.who} could not be built", [f"{_told(error)}"]) from error
        check_instance(instance, import_module(f"topkv.hooks.{kind}"), record.who)
        return instance

    def doctor(self, record: PluginRecord) -> list[str]:
        """What a usable plugin says of its libraries, for ``topkv doctor``.

        Raises:
            PluginError: what it named for that does not import.
        """
        if record.entry is None or record.entry.doctor is None:
            return []
        describe = self._import(record, record.entry.doctor)
        with aside():
            return [str(line) for line in describe()]

    def _import(self, record: PluginRecord, path: str) -> Any:
        module, attribute = path.split(":")
        try:
            with aside():
                return getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{record.who} does not import",
                [f"{path}: {_told(error)}; reinstall {record.package}, or mend what it needs"],
            ) from error

    def create_all(self, kind: str, *args: Any) -> list[Any]:
        """Build every usable plugin of a kind, for the kinds that nobody asks for by name.

        One that cannot be built is left out with a warning.
        """
        instances = []
        for record in self.usable(kind):
            try:
                instances.append(self.create(kind, record.name, *args))
            except TopkvError as error:
                warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=2)
        return instances


def _told_of(records: Sequence[PluginRecord]) -> list[str]:
    return [f"{record.package} {record.version}: {record.problem}" for record in records]


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # An error whose own text fails.
        return type(error).__name__


@cache
def registry() -> PluginRegistry:
    """The registry of this process: every installed package, looked up once."""
    return PluginRegistry()
