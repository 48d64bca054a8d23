"""Entry of the plugin, through which topkv finds the storage ``files``."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import field, frozen
from attrs.validators import optional

from topkv import hookimpl
from topkv.checks import byte_size
from topkv.entries import Capabilities, PluginEntry
from topkv.parameters import passes
from topkv_prefixes.entry import StorageEntry


def _directory(given: str) -> Path:
    path = os.path.expanduser(given)
    why = "" if given else "set it in params"
    if path.startswith("~"):
        why = "nobody of this name has a home directory; begin with './~' for a name"
    elif b"\0" in os.fsencode(path):  # which raises UnicodeEncodeError, a ValueError, too
        why = "a path has no character 0"
    if why:
        raise ValueError(f"must be that of a directory, got {given!r}: {why}")
    return Path(path)


@frozen
class FilesParams:
    """Parameters.

    Attributes:
        path: of the directory, whose ``~`` is a home directory; has to be set.
        limit: bytes, or a text such as ``"100GiB"``, above which what went unused longest is
            removed; None for any number.
        sync: files are on the disk before they take their name.
    """

    path: str | None = field(default=None, validator=optional(passes(_directory)))
    limit: int | str | None = field(default=None, validator=optional(passes(byte_size)))
    sync: bool = True

    @property
    def directory(self) -> Path:
        """Raises ValueError without one."""
        return _directory(self.path or "")

    @property
    def bytes(self) -> int | None:
        """The limit."""
        return None if self.limit is None else byte_size(self.limit)


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        StorageEntry(
            name="files",
            kind="storage",
            factories="topkv_files.storage:FilesStorage",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("cpu",)),
            quotas=True,
            parameters=FilesParams,
        )
    ]
