"""Entry of the KV format ``fp8``, whose rows several backends read."""

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
                "reference": "topkv_authoring.latent_fp8:LatentFp8",
                "triton": "topkv_authoring.latent_fp8:LatentFp8Kernels",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(attention=("mla",)),
        )
    ]
