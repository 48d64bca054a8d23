"""Entry of the plugin, through which topkv finds the observer ``prometheus``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import PluginEntry


@frozen
class PrometheusParams:
    """Parameters.

    Attributes:
        every: forwards from one look at the counts of the device to the next; the host waits for
            each look.
    """

    every: int = field(default=100, validator=ge(1))


@hookimpl
def topkv_register_observers() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="prometheus",
            kind="observer",
            factories="topkv_prometheus.observer:PrometheusObserver",
            hook_api=(3, 0),
            parameters=PrometheusParams,
        )
    ]
