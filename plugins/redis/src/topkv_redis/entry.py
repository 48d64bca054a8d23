"""Entry of the plugin, through which topkv finds the storage ``redis``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="redis",
            kind="storage",
            factories="topkv_redis.storage:RedisStorage",
            hook_api=(2, 7),
            capabilities=Capabilities(tiers=("cpu",)),
            parameters={
                "address": "127.0.0.1:6379",
                "username": None,
                "password": None,
                "database": 0,
                "namespace": "topkv",
                "expire_s": None,
                "timeout_s": 10.0,
            },
        )
    ]
