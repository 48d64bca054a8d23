"""Kinds of plugins: those of the core, and those that installed packages bring.

A package that makes plugins of a kind of its own points the entry-point group ``topkv.kinds`` at
the module of their hook specs, under the name of the kind. The module is like a page of
``topkv.hooks``, and is imported when the first plugin of that kind is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from topkv.entries import KINDS

GROUP = "topkv.kinds"


@cache
def kinds() -> Mapping[str, str]:
    """The module of hook specs of each kind, by its name; those of the core come first.

    A kind of the core stays the core's. Of packages that bring one kind, the first by name does.
    """
    own = {kind: f"topkv.hooks.{kind}" for kind in KINDS}
    brought = sorted(
        entry_points(group=GROUP), key=lambda point: (point.dist and point.dist.name) or ""
    )
    further: dict[str, str] = {}
    for point in brought:
        further.setdefault(point.name, point.value)
    return {**own, **{kind: page for kind, page in further.items() if kind not in own}}


def page_of(kind: str) -> ModuleType:
    """Import the module of hook specs of a kind."""
    return import_module(kinds()[kind])


def registering(kind: str) -> str:
    """The name of the hook by which packages return their entries of a kind."""
    return f"topkv_register_{kind}s"
