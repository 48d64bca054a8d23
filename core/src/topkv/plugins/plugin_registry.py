"""The registry: plugins by kind and name, why one cannot be used, and how an instance is made.

The module is not called ``registry`` because ``topkv.plugins.registry`` is the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from topkv.errors import PluginError, TopkvError, is_out_of_memory
from topkv.messages import close, raised, shown
from topkv.plugins import entry_checks
from topkv.plugins.contract import check_instance
from topkv.plugins.kinds import kinds, page_of
from topkv.plugins.project import package_of
from topkv.plugins.records import FAILURES, PluginRecord, aside, find, installed

PLUGINS_PAGE = "the documentation lists packages under Plugins"


class PluginRegistry:
    """Plugins by kind and name, and how instances of them are made.

    Args:
        plugins: ``(distribution name, version, module or object with topkv_register_* hooks)``,
            with an entry point in the last place that is loaded first; by default ``installed()``,
            the entry points of group ``topkv``. Those that ``TOPKV_BLOCK=a,b`` names, as ``point``
            or ``package:point``, are left out. The names of the core's own entries are taken; a
            name that two packages offer is used for neither.
    """

    def __init__(self, plugins: Sequence[tuple[str, str, object]] | None = None) -> None:
        self._records = find(installed() if plugins is None else plugins)

    def records(self) -> list[PluginRecord]:
        """Return every plugin that was found, broken or not, by kind, name and package."""
        return list(self._records)

    def usable(self, kind: str) -> list[PluginRecord]:
        """Return every plugin of a kind that can be used, by name."""
        return [record for record in self._records if record.kind == kind and not record.problem]

    def get(self, kind: str, name: str) -> PluginRecord:
        """The record of a usable plugin.

        Raises:
            PluginError: nothing of that kind has that name, or it has a problem.
        """
        for record in self.usable(kind):
            if record.name == name:
                return record
        broken = self.failed(kind, name)
        if broken:
            raise PluginError(f"{kind} {name!r} is installed and cannot be used", broken)
        raise PluginError(f"unknown {kind} {shown(name)}", self._unknown(kind, name))

    def _unknown(self, kind: str, name: str) -> list[str]:
        if kind not in kinds():
            return [f"there is no kind {kind!r} of plugin; the kinds are {', '.join(kinds())}"]
        names = [record.name for record in self.usable(kind)]
        meant = close(name, names)
        package = package_of(kind, name) if entry_checks.is_name(name) else None
        where = f"{package} does: pip install {package}" if package else PLUGINS_PAGE
        reason = (
            f"installed of kind {kind}: {', '.join(names) or 'none'}; {meant and meant + ' '}"
            f"no installed package offers it, and {where}"
        )
        return [reason, *(f"did not load: {why}" for why in self.failed(kind))]

    def failed(self, kind: str, name: str | None = None) -> list[str]:
        """A line for each plugin of a kind that cannot be used: package, version and reason.

        Args:
            kind: plugins whose kind is unknown, because they did not load, are listed too.
            name: only plugins of this name; all if None.
        """
        return [
            f"{record.package} {record.version}: {record.problem}"
            for record in self._records
            if record.problem and record.kind in (kind, None) and name in (record.name, None)
        ]

    def create(self, kind: str, name: str, setup: object, impl: str = "reference") -> Any:
        """Import a factory, build an instance, and check it against the specs of its kind.

        Args:
            kind, name: what to build.
            setup: what the factory takes; see the page of the kind in ``topkv.hooks``.
            impl: whose factory; makes no difference to kinds with one implementation.

        Raises:
            PluginError: it is unknown, does not import or build, or breaks its contract.
            TopkvError: whatever the factory refuses on purpose.
        """
        record = self.get(kind, name)
        factory = self.factory(record, impl)
        try:
            with aside():
                instance = factory(setup)
        except FAILURES as error:
            if isinstance(error, TopkvError) or is_out_of_memory(error):
                error.add_note(f"raised by {record.who}")
                raise
            raise PluginError(f"{record.who} could not be built", [raised(error)]) from error
        check_instance(instance, page_of(kind), record.who)
        return instance

    def factory(self, record: PluginRecord, impl: str = "reference") -> Any:
        """Import the factory of a usable plugin.

        Raises:
            PluginError: it has no such implementation, or does not import.
        """
        assert record.entry is not None  # a record without an entry has a problem
        path = record.entry.factories.get(impl)
        if path is None:
            offered = ", ".join(record.entry.impls)
            reason = f"it offers {offered}, got {impl}; set impl to one that it offers"
            raise PluginError(f"{record.who} has no such implementation", [reason])
        return self.load(record, path)

    def load(self, record: PluginRecord, path: str) -> Any:
        """Import ``"module:attribute"`` of a plugin. Raises PluginError where it does not."""
        module, attribute = path.split(":")
        try:
            with aside():
                return getattr(import_module(module), attribute)
        except FAILURES as error:
            reason = f"{path}: {raised(error)}; {_remedy(record, path, error)}"
            raise PluginError(f"{record.who} does not import", [reason]) from error


def _remedy(record: PluginRecord, path: str, error: BaseException) -> str:
    """Return how to fix an import that failed; a missing library is named."""
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    needed = (missing or "").partition(".")[0]
    if not needed or needed == path.partition(".")[0]:
        return f"reinstall {record.package}, or fix what it needs"
    plain = record.entry.factories.get("reference") if record.entry else None
    other = ", or set impl to 'reference'" if plain not in (None, path) else ""
    return f"it needs {needed}: pip install {needed}{other}"


@cache
def registry() -> PluginRegistry:
    """The registry of this process: every installed package, looked up once."""
    return PluginRegistry()
