"""Entry of the plugin, through which topkv finds the observer ``nvtx``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import PluginEntry


@hookimpl
def topkv_register_observers() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="nvtx",
            kind="observer",
            factories="topkv_nvtx.observer:NvtxObserver",
            hook_api=(3, 0),
            doctor="topkv_nvtx.ranges:describe",
        )
    ]
