"""Entry of the plugin, through which topkv finds the attention backend ``flash_attention``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_backends() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="flash_attention",
            kind="backend",
            factories={"triton": "topkv_flash_attention.backend:FlashAttention"},
            hook_api=(3, 0),
            capabilities=Capabilities(
                scopes=("kv_head", "shared"),
                attention=("gqa", "mla"),
                kv_formats=("model",),
                dtypes=("float16", "bfloat16"),
                softcap=True,
                queries=8,
                # Head dims depend on the kind of attention: the backend refuses.
                tiers=("gpu",),
            ),
            doctor="topkv_flash_attention.providers:describe",
        )
    ]
