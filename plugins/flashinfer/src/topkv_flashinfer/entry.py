"""Entry of the plugin, through which topkv finds the attention backend ``flashinfer``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_backends() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="flashinfer",
            kind="backend",
            factories={"triton": "topkv_flashinfer.backend:FlashInfer"},
            hook_api=(3, 0),
            capabilities=Capabilities(
                scopes=("kv_head", "shared"),
                attention=("gqa", "mla"),
                kv_formats=("model",),
                dtypes=("float16", "bfloat16"),
                softcap=True,
                queries=8,
                # Head dims depend on the kind of attention, which an entry cannot say: the
                # backend itself refuses those that it lacks.
                tiers=("gpu",),
            ),
            doctor="topkv_flashinfer.providers:describe",
        )
    ]
