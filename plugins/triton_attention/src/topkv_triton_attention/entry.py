"""Entry of the plugin, through which topkv finds the attention backend ``triton_attention``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_backends() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="triton_attention",
            kind="backend",
            factories={
                "reference": "topkv_triton_attention.backend:TritonAttention",
                "triton": "topkv_triton_attention.kernel_backend:TritonAttentionKernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128),
                scopes=("kv_head", "shared"),
                dtypes=("float16", "bfloat16", "float32"),
                attention=("gqa", "mla"),
                kv_formats=("model", "fp8"),
                # What head dims and groups are taken depends on the kind of attention: the
                # backend itself refuses those that it lacks.
                softcap=True,
                options=("skip_softmax",),
                host_memory=True,
                queries=8,
                tiers=("cpu", "interpret", "gpu"),
            ),
        )
    ]
