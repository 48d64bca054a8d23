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
                # Units and head dims depend on which library is there: the backend refuses.
                tiers=("gpu",),
            ),
            doctor="topkv_flash_attention.providers:describe",
        )
    ]
