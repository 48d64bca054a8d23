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
                hook_api=(2, 0),
            )
        ]

``topkv new NAME --kind algorithm`` writes such a package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pluggy

from topkv.entries import PluginEntry

Spec = TypeVar("Spec", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker("topkv")
hookimpl = pluggy.HookimplMarker("topkv")

OPTIONAL = "topkv_optional"


def optional(spec: Spec) -> Spec:
    """Mark a hook spec that an instance may leave out."""
    setattr(spec, OPTIONAL, True)
    return spec


@hookspec
def topkv_register_algorithms() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Selection algorithms; factories follow ``topkv.hooks.algorithm``."""


@hookspec
def topkv_register_backends() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Attention backends; factories follow ``topkv.hooks.backend``."""


@hookspec
def topkv_register_transfers() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Transfer engines; factories follow ``topkv.hooks.transfer``."""


@hookspec
def topkv_register_evictions() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Eviction policies; factories follow ``topkv.hooks.eviction``."""


@hookspec
def topkv_register_topks() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Implementations of exact top-k; factories follow ``topkv.hooks.topk``."""


@hookspec
def topkv_register_engines() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Engine integrations; factories follow ``topkv.hooks.engine``."""


@hookspec
def topkv_register_observers() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Observers; factories follow ``topkv.hooks.observer``."""


@hookspec
def topkv_register_stages() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Stages; factories follow ``topkv.hooks.stage``."""


@hookspec
def topkv_register_storages() -> list[PluginEntry]:  # type: ignore[empty-body]
    """Storages; factories follow ``topkv.hooks.storage``."""
