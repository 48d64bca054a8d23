"""Entry of the plugin, through which topkv finds the algorithm ``snapkv``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="snapkv",
            kind="algorithm",
            factories={
                "reference": "topkv_snapkv.algorithm:SnapKV",
                "triton": "topkv_snapkv.kernels:SnapKVTriton",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                # Not nested: true of one budget for all heads, not of ada.
                traits=("scale_free", "head_equivariant", "value_free"),
            ),
            defaults={"unit": 1, "scope": "kv_head"},
            parameters={
                "window": 64,
                "kernel": 7,
                "pool": "max",
                "generated": 256,
                "outgrow": "refuse",
                "ada": False,
                "ada_max": 2.0,
            },
        )
    ]
