"""Entry of the plugin, through which topkv finds the KV format ``fp8``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_kv_formats() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="fp8",
            kind="kv_format",
            factories={
                "reference": "topkv_fp8_kv_format.format:LatentFp8",
                "triton": "topkv_fp8_kv_format.format:LatentFp8Kernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(attention=("mla",)),
        )
    ]
