"""Entries of this package and of storages, read by topkv; imports neither torch nor triton."""

from __future__ import annotations

from attrs import frozen

from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv_prefixes.settings import PrefixSettings


@frozen
class StorageEntry(PluginEntry):
    """An entry of a storage; a plain ``PluginEntry`` is one that keeps no quotas.

    Attributes:
        quotas: the storage keeps each owner of objects within its quota.
    """

    quotas: bool = False


@hookimpl
def topkv_register_keepers() -> list[PluginEntry]:
    return [
        PluginEntry(
            "prefixes",
            "keeper",
            "topkv_prefixes.prefixes:PrefixKeeper",
            hook_api=(3, 0),
            parameters=PrefixSettings,
        )
    ]
