"""Hook specs of a storage, which keeps pages below host memory, for as long as it likes.

``factory(setup)`` gives one for a ``StorageSetup``. The parameter ``storage`` of ``prefixes``
names it, and packages return entries from ``topkv_register_storages``.

An object is a run of bytes under a key. Keys and bytes are those of who asks, topkv-prefixes: a
header with a checksum stands before the rest, and nothing is attended before all of it has been
checked. So a storage may lose, cut or damage an object; its page is then computed again. One that
removes what it finds by looking, in a place that others can write, looks first whether that
begins with the package's ``MAGIC``: nothing else is an object.

Every call may block: all of them are made on threads of their own, several at a time and never on
the one that runs forwards. An exception means that the whole batch has failed. One that
fails again and again, or hangs, is left alone for a while.

``topkv_testing.storages.StorageTests`` of topkv-testing tests one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from attrs import frozen

from topkv.plugins.discovery import hookspec

OWNER_BYTES = 8
"""First bytes of a key, which say whose the object is: pages of one owner, which is a tenant,
begin alike, in all processes and of all models. Keys of stored sessions begin at random: they are
nobody's."""

Place = Sequence[np.ndarray]
"""Memory of an object: the parts that it consists of, one behind the other. Each is
uint8, of one dimension and contiguous. The same object may be cut into other parts elsewhere."""


@frozen
class StorageSetup:
    """The argument of the factory of a storage.

    Attributes:
        params: instance of ``PluginEntry.parameters`` with the values that hold here.
        object_bytes: bytes of the largest object there will be.
        memory: uint8, the host pool, which holds most parts, for storages that register memory;
            small parts are elsewhere. It stays until ``close`` has returned.
        quota_of: how many bytes the objects of an owner may have together; None for any number,
            and None instead of a function where nobody has a quota. Storages whose entry is no
            ``topkv_prefixes.entry.StorageEntry(quotas=True)`` never get one.
    """

    params: Any
    object_bytes: int
    memory: np.ndarray
    quota_of: Callable[[bytes], int | None] | None = None


@frozen
class StorageUsage:
    """Bytes and objects that a storage holds.

    Attributes:
        bytes, objects: numbers now; other processes may be at work in it.
    """

    bytes: int
    objects: int


class Storage(Protocol):
    """Keeps objects. A key is 32 bytes. All methods are called from several threads at once."""

    @hookspec
    def exists(self, keys: Sequence[bytes]) -> int:
        """Count the first ``keys`` that are there, up to the first that is not.

        The count is a hint: an object may be gone a moment later. Called once for all
        pages of a prompt, in order and before any of them is read, so it says what is used.
        """

    @hookspec
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        """Copy objects into memory.

        Args:
            keys: of the objects.
            places: of each key, to be filled to the last byte. Nothing beside them is written,
                and nothing once the call has returned or raised.

        Returns:
            For each key whether its object is there and has exactly the bytes of its place. Where
            not, the place holds anything.
        """

    @hookspec
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        """Store objects. One that is there already stays as it is.

        A place is read until the call returns, and its bytes may change afterwards.

        Args:
            keys: of the objects, each once.
            places: of each key, which are only read.

        Returns:
            For each key whether its object is there now. A storage that is full says no, or makes
            room. One with quotas has no more of an owner than its quota when this returns, what
            others have stored for it included, and makes room for it of its own objects alone; an
            object that is larger than the quota costs none. Where several processes store at once
            each may leave a little more.
        """

    @hookspec
    def delete(self, keys: Sequence[bytes]) -> None:
        """Let go of the objects under ``keys`` that are there."""

    @hookspec
    def usage(self) -> StorageUsage:
        """Return how much is held now, for people to read."""

    @hookspec
    def close(self) -> None:
        """Let go of memory, files and connections. No call is under way, and none follows."""
