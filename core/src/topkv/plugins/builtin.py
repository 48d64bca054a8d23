"""Entries of the core itself: one of each kind that every configuration needs."""

from __future__ import annotations

from topkv.entries import Capabilities, PluginEntry
from topkv.plugins.discovery import hookimpl


@hookimpl
def topkv_register_transfers() -> list[PluginEntry]:
    return [
        PluginEntry(
            "zero_copy",
            "transfer",
            {
                "reference": "topkv.transfer.reference:ReferenceTransfer",
                "triton": "topkv.transfer.triton:TritonTransfer",
            },
            capabilities=Capabilities(host_formats=None, queries=None),
        )
    ]


@hookimpl
def topkv_register_evictions() -> list[PluginEntry]:
    return [PluginEntry("lru", "eviction", "topkv.transfer.eviction:LeastRecentlyUsed")]


@hookimpl
def topkv_register_kv_formats() -> list[PluginEntry]:
    every = Capabilities(attention=("gqa", "mla"))
    return [PluginEntry("model", "kv_format", "topkv.kv.kv_format:AsMade", capabilities=every)]


@hookimpl
def topkv_register_host_formats() -> list[PluginEntry]:
    every = Capabilities(attention=("gqa", "mla"))
    return [PluginEntry("model", "host_format", "topkv.kv.host_format:plain", capabilities=every)]


@hookimpl
def topkv_register_topks() -> list[PluginEntry]:
    kernels = Capabilities(tiers=("interpret", "gpu"))
    return [PluginEntry("radix", "topk", "topkv.ops.topk:RadixTopK", capabilities=kernels)]
