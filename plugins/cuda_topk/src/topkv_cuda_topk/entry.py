"""Entry of the plugin, through which topkv finds the top-k implementation ``cuda``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_topks() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="cuda",
            kind="topk",
            factories={"triton": "topkv_cuda_topk.topk:CudaTopK"},
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("gpu",)),
            doctor="topkv_cuda_topk.compiler:describe",
        )
    ]
