"""Discovery hooks: what a package offers. Collecting; called once per process, cold.

A package points the entry-point group ``topkv`` at a light module that imports neither torch
nor triton and implements the hooks of the kinds that it offers::

    from topkv import hookimpl
    from topkv.entries import PluginEntry

    @hookimpl
    def topkv_register_algorithms():
        return [
            PluginEntry(
                "mine",
                "algorithm",
                {"reference": "topkv_mine.algorithm:Mine"},
                hook_api=(3, 0),
            )
        ]

The hook of a kind, one of ``topkv.entries.KINDS`` or of another package, returns
``list[PluginEntry]`` and is named after the kind, such as ``topkv_register_host_formats``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pluggy

Spec = TypeVar("Spec", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker("topkv")
hookimpl = pluggy.HookimplMarker("topkv")

OPTIONAL = "topkv_optional"


def optional(spec: Spec) -> Spec:
    """Mark a hook spec that an instance may leave out."""
    setattr(spec, OPTIONAL, True)
    return spec
