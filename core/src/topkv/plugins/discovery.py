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

The hook of a kind is named after it and returns ``list[PluginEntry]``:
``topkv_register_algorithms``, ``topkv_register_stages``, ``topkv_register_backends``,
``topkv_register_transfers``, ``topkv_register_evictions``, ``topkv_register_topks``,
``topkv_register_engines``, ``topkv_register_observers``, ``topkv_register_keepers``,
``topkv_register_kv_formats``, ``topkv_register_host_formats``, and
``topkv_register_storages`` of ``topkv-prefixes``.
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
