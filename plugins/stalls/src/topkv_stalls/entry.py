"""Entry of the plugin, through which topkv finds the observer ``stalls``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import PluginEntry


@hookimpl
def topkv_register_observers() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="stalls",
            kind="observer",
            factories="topkv_stalls.observer:Stalls",
            hook_api=(3, 0),
        )
    ]
