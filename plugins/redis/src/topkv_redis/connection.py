"""A connection to a Redis server, as far as a storage needs one.

Values are sent from the memory that holds them, and received into the memory in which they are
wanted: no library of Redis does that, and the protocol (RESP 2) is small.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from topkv_redis.entry import RedisParams

END = b"\r\n"
BUFFER = 1 << 16
"""Bytes of what is received at a time when a line is wanted, and of short parts sent together."""


class RedisError(RuntimeError):
    """The server did not do what it was asked."""


class Refusal(RedisError):
    """The server answered with an error; the connection is whole.

    Attributes:
        kind: its first word.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kind = text.partition(" ")[0]


class Connection:
    """One connection, of one thread at a time. After any error but ``Refusal`` it is of no use.

    Args:
        settings: of the storage.

    Raises:
        OSError: there is no server, or it does not answer in time.
        RedisError: it refuses this client.
    """

    def __init__(self, settings: RedisParams) -> None:
        if isinstance(settings.place, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(settings.timeout_s)
        else:
            self._socket = socket.create_connection(settings.place, settings.timeout_s)
        # Longer parts of memory go past the buffers, both ways.
        self._in = self._socket.makefile("rb", BUFFER)
        self._out = self._socket.makefile("wb", BUFFER)
        try:
            if isinstance(settings.place, str):
                self._socket.connect(settings.place)
            else:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(settings)
        except BaseException:
            self.close()
            raise

    def _greet(self, settings: RedisParams) -> None:
        if settings.secret:
            who = [settings.username] if settings.username else []
            self.ask([["AUTH", *who, settings.secret]])
        if settings.database:
            self.ask([["SELECT", str(settings.database)]])
        self.ask([["PING"]])

    def close(self) -> None:
        # What was not sent goes with the connection, and nobody waits for it.
        shut_down = partial(self._socket.shutdown, socket.SHUT_RDWR)
        for end in (shut_down, self._out.close, self._in.close, self._socket.close):
            with suppress(OSError):
                end()

    def ask(self, commands: Sequence[Sequence[bytes | str]]) -> list[Any]:
        """Return the answers to short commands.

        Raises:
            Refusal: one of them is an error; the others have been answered.
        """
        self.send([b"".join(map(written, commands))])
        answers = [self.answer() for _ in commands]
        for answer in answers:
            if isinstance(answer, Refusal):
                raise answer
        return answers

    def send(self, parts: Sequence[Any]) -> None:
        """Send memory, one part behind the other."""
        self._out.writelines(parts)
        self._out.flush()

    def answer(self) -> Any:
        """Return the next answer: a text, an int, bytes, a list, None, or a ``Refusal``."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return Refusal(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if int(rest) < 0 else self._take(int(rest) + len(END))[: -len(END)]
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))]
        raise RedisError(f"this is no answer of a Redis server: {line[:40]!r}")

    def answer_into(self, place: Sequence[np.ndarray]) -> bool:
        """Receive the next answer into a place; return True if it is a value of exactly its bytes.

        Raises:
            Refusal: it is an error.
        """
        line = self._line()
        if line[:1] != b"$":
            raise (
                Refusal(line[1:].decode(errors="replace"))
                if line[:1] == b"-"
                else RedisError(f"expected a value, got {line[:40]!r}")
            )
        size = int(line[1:])
        if size < 0:
            return False
        if size != sum(len(part) for part in place):
            self._take(size + len(END))
            return False
        for part in place:
            _whole(self._in.readinto(part), len(part))
        self._take(len(END))
        return True

    def _line(self) -> bytes:
        """The next line, without its end."""
        line = self._in.readline()
        _whole(line.endswith(END), True)
        return line[: -len(END)]

    def _take(self, count: int) -> bytes:
        found = self._in.read(count)
        _whole(len(found), count)
        return found


def _whole(got: int, expected: int) -> None:
    """Raise ConnectionError where less came than was to come: files give less at their end."""
    if got != expected:
        raise ConnectionError("the server has closed the connection")


def written(arguments: Sequence[bytes | str], further: int = 0) -> bytes:
    """A command as it is sent.

    Args:
        further: arguments that are sent behind these.
    """
    return b"*%d\r\n" % (len(arguments) + further) + bulk(arguments)


def bulk(arguments: Sequence[bytes | str]) -> bytes:
    """Arguments of a command as they are sent."""
    plain = [each.encode() if isinstance(each, str) else each for each in arguments]
    return b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in plain)
