"""Entry of the plugin, through which topkv finds the stage and the observer ``regranulate``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="regranulate",
            kind="stage",
            factories={
                "reference": "topkv_regranulate.stage:Regranulate",
                "triton": "topkv_regranulate.kernels:RegranulateKernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(attention=("gqa", "mla"), regrains=True, queries=None),
        )
    ]


@hookimpl
def topkv_register_observers() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="regranulate",
            kind="observer",
            factories="topkv_regranulate.observer:ExtraTokens",
            hook_api=(3, 0),
        )
    ]
