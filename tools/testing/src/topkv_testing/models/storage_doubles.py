"""A storage in the memory of the process, with faults that a test asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field, frozen

from topkv.entries import Capabilities
from topkv.plugins.discovery import hookimpl
from topkv_prefixes.entry import StorageEntry
from topkv_prefixes.storage import OWNER_BYTES, Place, StorageSetup, StorageUsage


@define
class Shelf:
    """Objects that storages of one name share, and the faults of these storages.

    Attributes:
        objects: bytes by key.
        before: called with the name of each call and its keys before anything is done; may raise,
            and may block.
        limit: objects that there is room for.
        calls: how often each hook was called.
    """

    objects: dict[bytes, bytes] = field(factory=dict)
    before: Callable[[str, Sequence[bytes]], None] = lambda call, keys: None
    limit: int = 2**31
    calls: dict[str, int] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)


SHELVES: dict[str, Shelf] = {}
"""Shelves by the parameter ``shelf``. A test that makes one takes it away."""


class ShelfStorage:
    """A storage over a shelf, without a disk; the contract is ``topkv_prefixes.storage``."""

    def __init__(self, setup: StorageSetup) -> None:
        self.shelf = SHELVES.setdefault(setup.params.shelf, Shelf())
        self.quota_of = setup.quota_of

    def _begin(self, call: str, keys: Sequence[bytes]) -> None:
        with self.shelf.lock:
            self.shelf.calls[call] = self.shelf.calls.get(call, 0) + 1
        self.shelf.before(call, keys)

    @hookimpl
    def exists(self, keys: Sequence[bytes]) -> int:
        self._begin("exists", keys)
        present = [key in self.shelf.objects for key in keys]
        return present.index(False) if False in present else len(keys)

    @hookimpl
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        self._begin("get", keys)
        return [self._get(key, place) for key, place in zip(keys, places, strict=True)]

    def _get(self, key: bytes, place: Place) -> bool:
        found = self.shelf.objects.get(key)
        if found is None or len(found) != sum(len(part) for part in place):
            return False
        left = np.frombuffer(found, dtype=np.uint8)
        for part in place:
            part[:], left = left[: len(part)], left[len(part) :]
        return True

    @hookimpl
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        self._begin("put", keys)
        return [self._put(key, place) for key, place in zip(keys, places, strict=True)]

    def _put(self, key: bytes, place: Place) -> bool:
        whole = b"".join(part.tobytes() for part in place)
        quota = self._quota(key[:OWNER_BYTES])
        if quota is not None and len(whole) > quota:
            return False
        with self.shelf.lock:
            if key not in self.shelf.objects and len(self.shelf.objects) < self.shelf.limit:
                self.shelf.objects[key] = whole
                self._keep_quota(key[:OWNER_BYTES])
            return key in self.shelf.objects

    def _quota(self, owner: bytes) -> int | None:
        return self.quota_of(owner) if self.quota_of else None

    def _keep_quota(self, owner: bytes) -> None:
        """Delete the oldest objects of an owner until the rest is within its quota."""
        quota = self._quota(owner)
        own = {key: len(one) for key, one in self.shelf.objects.items() if key.startswith(owner)}
        over = 0 if quota is None else sum(own.values()) - quota
        for key, size in own.items():
            if over > 0:
                del self.shelf.objects[key]
                over -= size

    @hookimpl
    def delete(self, keys: Sequence[bytes]) -> None:
        self._begin("delete", keys)
        for key in keys:
            self.shelf.objects.pop(key, None)

    @hookimpl
    def usage(self) -> StorageUsage:
        held = list(self.shelf.objects.values())
        return StorageUsage(sum(map(len, held)), len(held))

    @hookimpl
    def close(self) -> None:
        """Do nothing: the shelf stays, for others."""


@frozen
class ShelfParams:
    """Parameters.

    Attributes:
        shelf: storages of the same shelf hold the same objects.
    """

    shelf: str = "default"


SHELF = StorageEntry(
    "shelf",
    "storage",
    f"{__name__}:ShelfStorage",
    capabilities=Capabilities(tiers=("cpu",)),
    quotas=True,
    parameters=ShelfParams,
)
