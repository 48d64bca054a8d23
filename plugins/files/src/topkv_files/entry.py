"""Entry of the plugin, through which topkv finds the storage ``files``."""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_prefixes.entry import StorageEntry


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        StorageEntry(
            name="files",
            kind="storage",
            factories="topkv_files.storage:FilesStorage",
            hook_api=(2, 7),
            capabilities=Capabilities(tiers=("cpu",)),
            quotas=True,
            parameters={"path": None, "limit": None, "sync": True},
        )
    ]
