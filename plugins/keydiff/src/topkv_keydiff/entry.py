"""Entry of the plugin, through which topkv finds the stage ``keydiff``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="keydiff",
            kind="stage",
            factories={
                "reference": "topkv_keydiff.stage:KeyDiff",
                "triton": "topkv_keydiff.kernels:KeyDiffKernels",
            },
            hook_api=(2, 7),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                traits=("exact_update", "head_equivariant", "value_free"),
            ),
            parameters={"tokens": 4096, "every": 256, "first": 64, "recent": 512},
        )
    ]
