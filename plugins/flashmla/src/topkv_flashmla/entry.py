"""Entry of the plugin, through which topkv finds the attention backend ``flashmla``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_backends() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="flashmla",
            kind="backend",
            factories={"triton": "topkv_flashmla.backend:FlashMLA"},
            hook_api=(3, 0),
            capabilities=Capabilities(
                scopes=("shared",),
                attention=("mla",),
                kv_formats=("model", "fp8"),
                dtypes=("bfloat16",),
                head_dims=(576,),
                max_group=128,
                queries=8,
                tiers=("gpu",),
            ),
            doctor="topkv_flashmla.providers:describe",
        )
    ]
