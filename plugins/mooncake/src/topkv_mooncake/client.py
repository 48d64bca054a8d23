"""A client of Mooncake, the memory that it has registered, and when it is replaced.

Mooncake waits a minute for a transfer and then says that it failed, without ending it: a holder
that was suspended and goes on writes into the memory of a call that has long returned. Closing
the client ends all of its transfers. So a client of which a call took that long is closed before
the call returns, and the next call makes another one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from topkv.checks import byte_size
from topkv_mooncake.addresses import host_towards, written
from topkv_mooncake.entry import MooncakeParams
from topkv_mooncake.library import Library

DOUBTFUL_S = 20.0
"""Seconds after which a call that failed may have left transfers under way: a holder that is gone
is noticed much earlier, and one that is silent after sixty."""

ABSENT, NOT_READY, FULL, EXISTS = -704, -703, -200, -705

MEANINGS = {
    -1: "an internal error, of which its log says more",
    -101: "no machine gives memory to the store",
    FULL: "no room",
    -600: "parameters that it does not take",
    NOT_READY: "an object that is being written",
    ABSENT: "no such object",
    EXISTS: "an object that is there",
    -706: "an object that is being read",
    -707: "the transfer took longer than the lease of the object, see its --default_kv_lease_ttl",
    -714: "an object that is being read",
    -800: "the transfer failed: the machine that holds the object does not answer",
    -900: "the master does not answer",
    -901: "the master did not answer in time, see MC_RPC_TIMEOUT_MS",
}


class MooncakeError(RuntimeError):
    """Mooncake did not do what it was asked."""


def meaning(code: int) -> str:
    """An error code in words."""
    return f"{code} ({MEANINGS.get(code, 'see the error codes of Mooncake Store')})"


class Client:
    """One client.

    Args:
        library: makes it.
        settings: of the storage.
        pool: the host pool, which is registered.
        size: bytes of a buffer for parts outside of the pool.

    Attributes:
        users: calls that are under way.
        doubtful: one of them may have left transfers behind.
        ended: nothing touches the registered memory any more.

    Raises:
        MooncakeError: no master, or it does not take the client.
    """

    def __init__(
        self, library: Library, settings: MooncakeParams, pool: np.ndarray, size: int
    ) -> None:
        self.users, self.doubtful, self.ending, self.ended = 0, False, False, False
        self._size, self._free = size, list[np.ndarray]()
        self._lock = threading.Lock()
        where = reach(settings)
        self._store = library.store()
        code = self._store.setup(
            *(where, settings.metadata, byte_size(settings.segment) if settings.segment else 0, 0),
            *(settings.protocol, settings.devices, written(settings.place)),
        )
        if code:
            raise MooncakeError(
                f"the client of {library.name} could not be set up at {where}: {meaning(code)}; "
                f"it was to use protocol {settings.protocol!r} and metadata {settings.metadata!r}"
            )
        try:
            if pool.nbytes:
                self._register(pool)
        except BaseException:
            self._store.close()
            raise

    def _register(self, memory: np.ndarray) -> None:
        code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise MooncakeError(f"{memory.nbytes} bytes could not be registered: {meaning(code)}")

    @contextmanager
    def buffer(self) -> Iterator[np.ndarray]:
        """Registered memory for one call."""
        with self._lock:
            free = self._free.pop() if self._free else None
        if free is None:
            free = np.empty(self._size, dtype=np.uint8)
            self._register(free)
        try:
            yield free
        finally:
            if not self.doubtful:  # or what was left behind might write into the next call's
                with self._lock:
                    self._free.append(free)

    def call(self, name: str, *arguments: Any, **options: Any) -> list[int]:
        """The codes of a call with a list of keys."""
        began = time.monotonic()
        codes: list[int] = getattr(self._store, name)(*arguments, **options)
        late = time.monotonic() - began > DOUBTFUL_S
        if late and any(code < 0 for code in codes):
            self.doubtful = True
        return codes

    def size_of(self, key: str) -> int:
        """Bytes of an object, or a negative code."""
        return int(self._store.get_size(key))

    def close(self) -> None:
        """End all transfers, and let go of all memory."""
        code = self._store.close()
        if code:
            raise MooncakeError(f"the client could not be closed: {meaning(code)}")


def reach(settings: MooncakeParams) -> str:
    """The name of this host, once a master answers; Mooncake itself would try for minutes.

    Raises:
        MooncakeError: none does.
    """
    host, port = settings.place
    try:
        socket.create_connection(settings.place, settings.connect_s).close()
        return settings.host or host_towards(settings.place)
    except OSError as error:
        raise MooncakeError(
            f"no master answers at {host}:{port} within {settings.connect_s} s: {error}; start "
            f"one there with `mooncake_master --rpc_port={port}`, or set master in params"
        ) from error


class Clients:
    """The client of a storage, made anew where the last one was in doubt. Any thread.

    Args:
        library, settings, pool, size: see ``Client``.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments, self._changed = arguments, threading.Condition()
        self._client: Client | None = Client(*arguments)

    @contextmanager
    def use(self) -> Iterator[Client]:
        """The client, for a call.

        Returns when nothing of that call is under way any more.
        """
        with self._changed:
            if self._client is None:
                self._client = Client(*self._arguments)
            client = self._client
            client.users += 1
        try:
            yield client
        finally:
            with self._changed:
                client.users -= 1
                self._changed.notify_all()
            if client.doubtful:
                self._end(client)

    def _end(self, client: Client) -> None:
        """Close a client when all who use it are done, and wait until it is."""
        with self._changed:
            if self._client is client:
                self._client = None
            self._changed.wait_for(lambda: not client.users)
            first, client.ending = not client.ending, True
            if not first:
                self._changed.wait_for(lambda: client.ended)
                return
        try:
            client.close()
        finally:
            with self._changed:
                client.ended = True
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of everything. No call is under way."""
        with self._changed:
            client, self._client = self._client, None
        if client is not None:
            client.close()
