"""What this package offers to topkv."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_stages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="triattention",
            kind="stage",
            factories={
                "reference": "topkv_triattention.stage:TriAttention",
                "triton": "topkv_triattention.launch:TriAttentionTriton",
            },
            hook_api=(2, 3),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                # Not head_equivariant: each head has a calibration of its own.
                traits=("exact_update", "value_free"),
            ),
            parameters={
                "calibration": None,
                "tokens": 4096,
                "every": 256,
                "first": 64,
                "recent": 512,
            },
        )
    ]
