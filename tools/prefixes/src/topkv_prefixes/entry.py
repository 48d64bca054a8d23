"""Entries of this package and of storages, read by topkv; imports neither torch nor triton."""

from __future__ import annotations

from attrs import frozen

from topkv import hookimpl
from topkv.entries import PluginEntry


@frozen
class StorageEntry(PluginEntry):
    """An entry of a storage; a plain ``PluginEntry`` is one that keeps no quotas.

    Attributes:
        quotas: the storage keeps each owner of objects within its quota.
    """

    quotas: bool = False


def keeps_quotas(entry: PluginEntry) -> bool:
    """Return True if the storage of an entry keeps each owner within its quota."""
    return isinstance(entry, StorageEntry) and entry.quotas


@hookimpl
def topkv_register_keepers() -> list[PluginEntry]:
    return [
        PluginEntry(
            "prefixes",
            "keeper",
            "topkv_prefixes.prefixes:PrefixKeeper",
            hook_api=(2, 7),
            parameters={"keep": "prompt", "storage": None, "quotas": None},
        )
    ]
