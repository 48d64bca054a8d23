"""The storage ``files``: an object is a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from topkv import hookimpl
from topkv.config.checks import byte_size
from topkv.errors import ConfigError
from topkv.hooks.storage import Place, StorageSetup, StorageUsage
from topkv_files.folder import Folder

LEFT = 0.9
"""Of the limit is left when files were removed, so that not every write has to."""

LOOKS = 16
"""How often a process looks at the whole directory while it writes as much as the limit: others
write too."""


class FilesStorage:
    """The contract is ``topkv.hooks.storage``. Threads share nothing but a count of bytes.

    Args:
        setup: ``params``: ``path`` of the directory; ``limit``, bytes or a text such as
            ``"100GiB"``, above which what went unused longest is removed; ``sync``, whether files
            are on the disk before they take their name.

    Raises:
        ConfigError: a parameter is wrong, or the directory cannot be used.
    """

    def __init__(self, setup: StorageSetup) -> None:
        reasons, limit = [], None
        path, sync = setup.params["path"], setup.params["sync"]
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            reasons.append(f"path must be that of a directory, got {path!r}; set it in params")
        if not isinstance(sync, bool):
            reasons.append(f"sync must be true or false, got {sync!r}")
        if setup.params["limit"] is not None:
            try:
                limit = byte_size(setup.params["limit"])
            except ValueError as error:
                reasons.append(f"limit {error}")
        if not reasons:
            try:
                self._folder = Folder(path, sync)
                self._folder.clean()
                self._used = sum(each.size for each in self._folder.held())
            except OSError as error:
                reasons.append(f"path {os.fspath(path)!r} cannot be used: {error}")
        if reasons:
            raise ConfigError("storage files cannot be opened", reasons)
        self._limit, self._lock, self._written = limit, threading.Lock(), 0

    @hookimpl
    def exists(self, keys: Sequence[bytes]) -> int:
        for count, key in enumerate(keys):
            if not os.path.exists(self._folder.path_of(key)):
                return count
        return len(keys)

    @hookimpl
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        done = [self._folder.read(key, place) for key, place in zip(keys, places, strict=True)]
        if self._limit is not None:
            self._folder.touch([key for key, there in zip(keys, done, strict=True) if there])
        return done

    @hookimpl
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        done = []
        for key, place in zip(keys, places, strict=True):
            done.append(self._folder.write(key, place))
            if not done[-1]:
                break  # the disk is full
        if self._limit is not None:
            self._folder.touch([key for key, there in zip(keys, done, strict=False) if there])
            self._count(sum(len(part) for place in places[: sum(done)] for part in place))
        return done + [False] * (len(keys) - len(done))

    def _count(self, size: int) -> None:
        with self._lock:
            self._used += size
            self._written += size
            if self._used <= self._limit and self._written * LOOKS <= self._limit:
                return
            self._written = 0
            self._used = self._folder.shrink(self._limit, int(LEFT * self._limit))

    @hookimpl
    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._folder.remove(key)

    @hookimpl
    def usage(self) -> StorageUsage:
        sizes = [each.size for each in self._folder.held()]
        return StorageUsage(sum(sizes), len(sizes))

    @hookimpl
    def close(self) -> None:
        """Files stay."""
