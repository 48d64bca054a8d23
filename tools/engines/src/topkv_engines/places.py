"""Places of an engine that a package overrides, patches or reads, in one table.

An engine promises none of them. Each is looked up in the version that runs before a worker is
made, so that one that has moved is refused by name, and not found in the middle of a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from attrs import frozen


@frozen
class Place:
    """One place.

    Attributes:
        module, name: where it is, ``""`` for the module alone; a dotted name for a method.
        why: what it is for, for readers.
        parameters: names of arguments that are handed over, or taken.
        alone: True if no others may be wanted.
        fields: names that the class has, its instances too.
        device: device that it is for; None for all.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    device: str | None = None
    alone: bool = False

    @property
    def path(self) -> str:
        """The place in full."""
        return f"{self.module}.{self.name}"


def moved(places: Iterable[Place], device: str, engine: str) -> list[str]:
    """Reasons against the version of an engine that is installed: each place that is not as it
    was.

    Args:
        places: to look up.
        device: that the engine runs on.
        engine: its name, for the reasons.
    """
    return [
        f"{place.path}, which {place.why}, {reason}: this version of {engine} has moved it"
        for place in places
        if place.device in (None, device)
        for reason in _lacks(place)
    ]


def table(places: Iterable[Place]) -> str:
    """The table of a README."""
    rows = ["| place | what it does here | names of it |", "|---|---|---|"]
    for place in places:
        names = ", ".join(f"`{name}`" for name in (*place.parameters, *place.fields))
        rows.append(f"| `{place.path}` | {place.why} | {names} |")
    return "\n".join(rows)


def _lacks(place: Place) -> Iterator[str]:
    try:
        found: Any = import_module(place.module)
        for part in place.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        yield f"is not there ({error})"
        return
    if place.parameters:
        known = inspect.signature(found).parameters
        if missing := [name for name in place.parameters if name not in known]:
            yield f"takes no {', '.join(missing)}"
        wanted = [name for name, each in known.items() if _is_wanted(each)]
        if place.alone and (others := [n for n in wanted if n not in ("self", *place.parameters)]):
            yield f"wants {', '.join(others)} too"
    if missing := [name for name in place.fields if not _has(found, name)]:
        yield f"has no {', '.join(missing)}"


def _is_wanted(parameter: inspect.Parameter) -> bool:
    many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not many and parameter.default is parameter.empty


def _has(kind: type, name: str) -> bool:
    """Return True if a class has a name, or its instances get it: in its source, where else."""
    annotated = [vars(each).get("__annotations__", {}) for each in kind.__mro__]
    if hasattr(kind, name) or any(name in each for each in annotated):
        return True
    return any(f"self.{name}" in _source(each) for each in kind.__mro__)


@cache  # finding a class parses its whole file
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # builtins have none
        return ""
