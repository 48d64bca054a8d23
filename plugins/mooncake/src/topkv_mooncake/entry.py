"""Entry of the plugin, through which topkv finds the storage ``mooncake``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="mooncake",
            kind="storage",
            factories="topkv_mooncake.storage:MooncakeStorage",
            hook_api=(2, 7),
            capabilities=Capabilities(tiers=("cpu",)),
            parameters={
                "master": "127.0.0.1:50051",
                "host": None,
                "protocol": "tcp",
                "devices": "",
                "metadata": "P2PHANDSHAKE",
                "segment": None,
                "buffer": "16MiB",
                "replicas": 1,
                "namespace": "topkv",
                "admin": None,
                "connect_s": 5.0,
            },
            doctor="topkv_mooncake.library:describe",
        )
    ]
