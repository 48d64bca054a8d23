"""The storage ``files``: an object is a file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv_files import owned
from topkv_files.bounds import Bound
from topkv_files.entry import FilesParams
from topkv_files.folder import Folder
from topkv_prefixes.storage import OWNER_BYTES, Place, StorageSetup, StorageUsage

HEAD = "storage files cannot be opened"


class FilesStorage:
    """The contract is ``topkv_prefixes.storage``. Threads share nothing but counts of bytes.

    Args:
        setup: ``params`` are ``FilesParams``.

    Raises:
        ConfigError: there is no path, or the directory cannot be used, or holds what the
            storage has not made.
    """

    def __init__(self, setup: StorageSetup) -> None:
        params: FilesParams = setup.params
        limit, self._found = params.bytes, Counter[bytes]()
        try:
            path = params.directory
            owned.claim(path)
            self._folder = Folder(path, params.sync)
            self._folder.clean()
            for each in self._folder.held():
                self._found[each.key[:OWNER_BYTES]] += each.size
        except (OSError, owned.ForeignError) as error:
            reason = f"path {str(path)!r} cannot be used: {error}"
            raise ConfigError(HEAD, [reason]) from error
        except ValueError as error:
            raise ConfigError(HEAD, [f"path {error}"]) from error
        self._quota_of, self._lock = setup.quota_of, threading.Lock()
        self._all = None if limit is None else Bound(limit, self._found.total())
        self._owners: dict[bytes, Bound | None] = {}

    @hookimpl
    def exists(self, keys: Sequence[bytes]) -> int:
        found = 0
        while found < len(keys) and self._folder.has(keys[found]):
            found += 1
        if self._bounded:
            self._folder.touch(keys[:found])  # all of a prompt at once, before any is read
        return found

    @hookimpl
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        return [self._folder.read(key, place) for key, place in zip(keys, places, strict=True)]

    @hookimpl
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        done = []
        for key, place in zip(keys, places, strict=True):
            bound = self._bound_of(key)
            fits = bound is None or sum(len(part) for part in place) <= bound.limit
            fits = fits and not self._folder.blocked(key)
            done.append(fits and self._folder.write(key, place))
            if fits and not done[-1]:
                break  # the disk is full
        done += [False] * (len(keys) - len(done))
        if self._bounded:
            stored = [
                (key, place) for key, place, was in zip(keys, places, done, strict=True) if was
            ]
            self._folder.touch([key for key, _ in stored])
            if self._count({key: sum(len(part) for part in place) for key, place in stored}):
                done = [was and self._folder.has(key) for key, was in zip(keys, done, strict=True)]
        return done

    @property
    def _bounded(self) -> bool:
        return self._all is not None or self._quota_of is not None

    def _bound_of(self, key: bytes) -> Bound | None:
        """The quota of whoever an object is of."""
        owner = key[:OWNER_BYTES]
        if self._quota_of is None:
            return None
        with self._lock:
            if owner not in self._owners:
                quota, found = self._quota_of(owner), self._found[owner]
                self._owners[owner] = None if quota is None else Bound(quota, found, owner)
            return self._owners[owner]

    def _count(self, sizes: dict[bytes, int]) -> bool:
        """Count what was written, and keep to the limits; whether that may have removed some."""
        written: Counter[Bound] = Counter()
        for key, size in sizes.items():
            for bound in (self._bound_of(key), self._all):
                if bound is not None:
                    written[bound] += size
        with self._lock:
            due = [bound for bound, size in written.items() if bound.add(size)]
            if due:
                self._folder.shrink(due, wait=any(bound.owner for bound in due))
        return bool(due)

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
