"""Optional libraries of plugins: places that are tried in order, and why each was refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from attrs import frozen

from topkv.errors import CapabilityError

BROKEN = (ImportError, OSError, RuntimeError, AttributeError)
"""Exceptions on import of packages whose binaries do not fit this torch, driver or device."""


class UnusableError(Exception):
    """A place holds nothing that can be called; its arguments are the reasons, each a text."""


class Named(Protocol):
    """A library; ``name`` says where it comes from, and its version where that is known."""

    @property
    def name(self) -> str: ...


Library = TypeVar("Library", bound=Named)


@frozen
class Places(Generic[Library]):
    """Places that are tried for a library, in order.

    Attributes:
        missing: text of the error where no place serves, with how to fix that.
        loads: by name of a place, a function that returns the library or raises
            ``UnusableError``.
    """

    missing: str
    loads: Mapping[str, Callable[[], Library]]

    def look(self) -> Iterator[tuple[str, Library | None, Sequence[str]]]:
        """Yield each place, its library, and why there is none; looks when it is asked."""
        for place, load in self.loads.items():
            try:
                library, reasons = load(), ()
            except UnusableError as error:
                library, reasons = None, error.args
            yield place, library, reasons

    def first(
        self, refusals: Callable[[Library], Sequence[str]] | None = None
    ) -> tuple[Library | None, list[str]]:
        """The first library that serves, and why those before it do not; the rest is not loaded.

        Args:
            refusals: why a library does not serve, although it can be called; None if any does.
        """
        tried: list[str] = []
        for place, library, reasons in self.look():
            if library is not None:
                reasons = refusals(library) if refusals else ()
                if not reasons:
                    return library, tried
            tried += [f"{place}: {reason}" for reason in reasons]
        return None, tried

    def require(
        self,
        head: str,
        reasons: Sequence[str] = (),
        refusals: Callable[[Library], Sequence[str]] | None = None,
    ) -> Library:
        """The first library that serves.

        Args:
            head: first line of the error.
            reasons: against whichever library there is.
            refusals: as for ``first``.

        Raises:
            CapabilityError: with ``reasons``, and with what was tried where no place serves.
        """
        library, tried = self.first(refusals)
        if library is None:
            reasons = [*reasons, f"{self.missing}; tried were", *(f"  {each}" for each in tried)]
        if reasons or library is None:
            raise CapabilityError(head, reasons)
        return library

    def describe(self) -> list[str]:
        """A line for each place, as ``topkv.entries.PluginEntry.doctor`` returns them."""
        return [
            f"{place}: {'; '.join(reasons) if library is None else f'ok, {library.name}'}"
            for place, library, reasons in self.look()
        ]


def module_with(name: str, functions: Mapping[str, Sequence[str]]) -> ModuleType:
    """Import a module that is known by what it offers, not by its version.

    Args:
        functions: by name, which may be dotted, the arguments that each must take.

    Raises:
        UnusableError: it does not import, or with everything that it lacks.
    """
    try:
        module = import_module(name)
    except BROKEN as error:
        raise UnusableError(in_one_line(error, name)) from error
    reasons = []
    for path, arguments in functions.items():
        try:
            function = attrgetter(path)(module)
        except AttributeError:
            reasons.append(f"it has no {path}")
            continue
        taken = inspect.signature(inspect.unwrap(function)).parameters
        lacking = [repr(argument) for argument in arguments if argument not in taken]
        if lacking:
            reasons.append(f"{path} takes no {', '.join(lacking)}")
    if reasons:
        raise UnusableError(*reasons)
    return module


def in_one_line(error: Exception, name: str = "") -> str:
    """An error in one line; for a missing module, whether it is ``name`` or what that needs."""
    text = (str(error).splitlines() or ["no reason given"])[0]
    if isinstance(error, ModuleNotFoundError) and name and error.name:
        itself = f"{name}.".startswith(f"{error.name}.")
        text = "not installed" if itself else f"it needs {error.name}"
    return f"{type(error).__name__}: {text}"
