"""Entry of the plugin, through which topkv finds the top-k implementation ``pivot``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_topks() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="pivot",
            kind="topk",
            # Of both implementations: a reference selects by itself and never makes one.
            factories="topkv_triton_topk.topk:PivotTopK",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("interpret", "gpu")),
        )
    ]
