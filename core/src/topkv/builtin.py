"""What the core itself offers: transfer engine, eviction policy and exact top-k."""

from __future__ import annotations

from topkv.entries import PluginEntry
from topkv.hooks.registry import hookimpl


@hookimpl
def topkv_register_transfers() -> list[PluginEntry]:
    return [
        PluginEntry(
            "zero_copy",
            "transfer",
            {
                "reference": "topkv.transfer.engine:ZeroCopyTransfer",
                "triton": "topkv.transfer.engine:triton",
            },
        )
    ]


@hookimpl
def topkv_register_evictions() -> list[PluginEntry]:
    return [PluginEntry("lru", "eviction", "topkv.transfer.eviction:LeastRecentlyUsed")]


@hookimpl
def topkv_register_topks() -> list[PluginEntry]:
    return [PluginEntry("radix", "topk", "topkv.ops.topk:RadixTopK")]
