"""The storage ``redis``: an object is a value of a Redis server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv_prefixes.storage import Place, StorageSetup, StorageUsage
from topkv_redis.connection import END, Connection, RedisError, Refusal, bulk, written
from topkv_redis.entry import RedisParams

AT_ONCE = 8
"""Values that are asked for before the first has come; the server has them ready."""

SHORT = 1024
"""Commands that are sent before the first answer is read; those have a few bytes each."""

FULL = "OOM"

Answer = TypeVar("Answer")


class RedisStorage:
    """The contract is ``topkv_prefixes.storage``. Each call has a connection for itself.

    Args:
        setup: ``params`` are ``RedisParams``.

    Raises:
        ConfigError: no server answers, or not to this client.
    """

    def __init__(self, setup: StorageSetup) -> None:
        settings: RedisParams = setup.params
        self._settings, self._lock, self._free = settings, threading.Lock(), list[Connection]()
        try:
            self._free.append(Connection(settings))
        except (OSError, RedisError) as error:
            reason = (
                f"no server serves this client at {settings.where}: {error}; start one with "
                "`redis-server --maxmemory 8gb --maxmemory-policy allkeys-lru --save ''`, or set "
                "address, username and password in params"
            )
            raise ConfigError("storage redis cannot be opened", [reason]) from error

    @hookimpl
    def exists(self, keys: Sequence[bytes]) -> int:
        present = self._call("exists", lambda connection: self._present(connection, keys))
        return [*present, False].index(False)

    @hookimpl
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        return self._call("get", lambda connection: self._get(connection, keys, places))

    @hookimpl
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        return self._call("put", lambda connection: self._put(connection, keys, places))

    @hookimpl
    def delete(self, keys: Sequence[bytes]) -> None:
        def remove(connection: Connection) -> None:
            for at in range(0, len(keys), SHORT):
                names = [self._name(key) for key in keys[at : at + SHORT]]
                connection.ask([["UNLINK", *names]])

        self._call("delete", remove)

    @hookimpl
    def usage(self) -> StorageUsage:
        def count(connection: Connection) -> StorageUsage:
            pattern, cursor, names = f"{self._settings.namespace}:*", b"0", set[bytes]()
            while True:
                ((cursor, some),) = connection.ask(
                    [["SCAN", cursor, "MATCH", pattern, "COUNT", "1000"]]
                )
                names.update(some)
                if cursor == b"0":
                    break
            sizes, listed = 0, sorted(names)
            for at in range(0, len(listed), SHORT):
                sizes += sum(connection.ask([["STRLEN", n] for n in listed[at : at + SHORT]]))
            return StorageUsage(sizes, len(names))

        return self._call("usage", count)

    @hookimpl
    def close(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def _name(self, key: bytes) -> bytes:
        return b"%b:%b" % (self._settings.namespace.encode(), key)

    def _call(self, what: str, do: Callable[[Connection], Answer]) -> Answer:
        """Do something with a connection; once more if one of an earlier call has ended since.

        Raises:
            RedisError: with the server's address.
        """
        try:
            with self._lock:
                connection = self._free.pop() if self._free else None
            if connection is not None:
                try:
                    return self._with(connection, do)
                except ConnectionError:
                    self.close()  # the others are of the same server
            return self._with(Connection(self._settings), do)
        except (OSError, RedisError) as error:
            raise RedisError(f"{what} at {self._settings.where}: {error}") from error

    def _with(self, connection: Connection, do: Callable[[Connection], Answer]) -> Answer:
        try:
            answer = do(connection)
        except BaseException:
            connection.close()  # what it has not read yet would answer the next call
            raise
        with self._lock:
            self._free.append(connection)
        return answer

    # With one connection.

    def _present(self, connection: Connection, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(keys), SHORT):
            some = [[b"EXISTS", self._name(key)] for key in keys[at : at + SHORT]]
            found += [answer == 1 for answer in connection.ask(some)]
        return found

    def _get(
        self, connection: Connection, keys: Sequence[bytes], places: Sequence[Place]
    ) -> list[bool]:
        done: list[bool] = []
        for at in range(0, len(keys), AT_ONCE):
            connection.send([written(["GET", self._name(key)]) for key in keys[at : at + AT_ONCE]])
            done += [connection.answer_into(place) for place in places[at : at + AT_ONCE]]
        return done

    def _put(
        self, connection: Connection, keys: Sequence[bytes], places: Sequence[Place]
    ) -> list[bool]:
        """Send values that the server does not have; one that comes meanwhile stays (``NX``)."""
        done = self._present(connection, keys)
        for number, (key, place) in enumerate(zip(keys, places, strict=True)):
            if not done[number]:
                done[number] = self._set(connection, self._name(key), place)
        return done

    def _set(self, connection: Connection, name: bytes, place: Place) -> bool:
        """Send a value; return True if the server has one now, False if it is full."""
        size = sum(len(part) for part in place)
        expire = self._settings.expire_s
        options = ["NX"] if expire is None else ["NX", "EX", str(expire)]
        begin = written(["SET", name], 1 + len(options)) + b"$%d\r\n" % size
        connection.send([begin, *place, END + bulk(options)])
        answer = connection.answer()
        if isinstance(answer, Refusal):
            if answer.kind == FULL:
                return False
            raise answer
        return True  # also where somebody else was faster
