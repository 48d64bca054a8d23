"""Entry of the plugin, through which topkv finds the observer ``prometheus``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import PluginEntry


@hookimpl
def topkv_register_observers() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="prometheus",
            kind="observer",
            factories="topkv_prometheus.observer:PrometheusObserver",
            hook_api=(2, 3),
        )
    ]
