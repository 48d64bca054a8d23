"""What this package offers to topkv."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_backends() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="triton_attention",
            kind="backend",
            factory="topkv_triton_attention.backend:TritonAttention",
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                dtypes=("float16", "bfloat16", "float32"),
                head_dims=(64, 96, 128, 256),
                max_group=16,
                host_memory=True,
                tiers=("cpu", "interpret", "gpu"),
            ),
        )
    ]
