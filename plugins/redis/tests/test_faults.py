"""Servers that are killed, absent, full or silent, and answers that come in pieces."""

from __future__ import annotations

import io
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest
from redis_pages import PROGRAM, SIZE, key_of, made, page, put, read

from tests.machines import ENVIRONMENT
from topkv.errors import ConfigError
from topkv_redis.connection import RedisError
from topkv_redis.entry import PASSWORD


def start(*command):
    return subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )


def test_a_server_that_is_killed_and_comes_back(make_server):
    server = make_server()
    storage = made(server.params)
    assert put(storage, 1, 2) == [True, True]
    server.kill()
    for call in (lambda: read(storage, 1), lambda: put(storage, 3), storage.usage):
        with pytest.raises(RedisError, match=r"(get|put|usage) at .*redis.sock: "):
            call()
    server.start()
    assert [read(storage, number) for number in (1, 2)] == ["absent"] * 2
    assert put(storage, 1) == [True]
    server.kill()
    server.start()  # between two calls: a connection of the first is of no use
    assert put(storage, 1) == [True]
    assert read(storage, 1) is None
    storage.close()


def test_a_server_that_is_silent(make_server):
    """The server is silent for longer than it may be. Its later words are nobody's answer."""
    server = make_server()
    storage = made(server.params, timeout_s=0.3)
    assert put(storage, 1, 2) == [True, True]
    room = np.full(SIZE + 4096, 7, dtype=np.uint8)
    server.suspend()
    with pytest.raises(RedisError, match=r"get at .*redis.sock: timed out"):
        storage.get([key_of(1)], [[room]])
    server.wake()
    assert read(storage, 2) is None
    assert (room == 7).all()
    storage.close()


def test_a_server_that_is_full_says_no_or_makes_room(make_server):
    full = made(make_server("--maxmemory", "8mb").params)
    done = [there for number in range(200) for there in put(full, number)]
    assert 20 < done.count(True) < 160
    assert not any(done[done.index(False) :])
    for number, there in enumerate(done):
        assert read(full, number) == (None if there else "absent")
    full.delete([key_of(number) for number in range(200)])
    assert put(full, 150) == [True]
    full.close()
    policy = ["--maxmemory-policy", "allkeys-lru"]
    lasting = made(make_server("--maxmemory", "8mb", *policy).params)
    assert all(put(lasting, number) == [True] for number in range(200))
    assert lasting.usage().bytes < 8 << 20
    assert read(lasting, 199) is None
    assert {read(lasting, number) for number in range(199)} == {None, "absent"}
    lasting.close()


def test_objects_expire_when_they_shall(shared):
    storage = made(shared.params, namespace="expiring", expire_s=1)
    assert put(storage, 1) == [True]
    end = time.monotonic() + 60
    while read(storage, 1) is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert read(storage, 1) == "absent"
    assert made(shared.params, namespace="expiring").usage().objects == 0
    storage.close()


@contextmanager
def answering(*answers):
    """Somebody who says the same to whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            found, _ = listening.accept()
            with found:
                for answer in answers:
                    found.recv(1 << 16)
                    found.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        yield {"address": f"127.0.0.1:{listening.getsockname()[1]}"}
        thread.join(60)


def test_who_does_not_serve_is_reported(make_server, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        made({"address": "unix:/nowhere/redis.sock"})
    (reason,) = refused.value.reasons
    assert "no server serves this client at /nowhere/redis.sock: [Errno 2] No such file" in reason
    assert "start one with `redis-server --maxmemory 8gb" in reason
    with (
        answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as params,
        pytest.raises(ConfigError, match=r"this is no answer of a Redis server: b'HTTP/1.1 400"),
    ):
        made(params)
    server = make_server("--requirepass", "open sesame")
    with pytest.raises(ConfigError, match="NOAUTH Authentication required"):
        made(server.params)
    with pytest.raises(ConfigError, match="WRONGPASS"):
        made(server.params, password="open barley")
    with pytest.raises(ConfigError, match="DB index is out of range"):
        made(server.params, password="open sesame", database=1000)
    monkeypatch.setenv(PASSWORD, "open sesame")
    assert put(made(server.params), 1) == [True]
    assert put(made(server.params, username="default"), 1) == [True]


def test_an_answer_that_ends_early(shared):
    """An end in the middle of a value fails the whole batch, and leaves no half of a page."""
    value = b"$%d\r\n" % (SIZE + 4096) + b"x" * 5000
    with answering(b"+PONG\r\n", value) as params:
        storage = made(params, timeout_s=1)
        with pytest.raises(RedisError, match=r"get at 127.0.0.1:"):
            read(storage, 1)


def test_a_value_of_another_kind_is_an_error_and_the_next_call_works(shared):
    storage = made(shared.params, namespace="kinds")
    (connection,) = storage._free
    connection.ask([["HSET", b"kinds:" + key_of(1), "a", "b"]])
    assert put(storage, 2) == [True]
    room = [np.zeros(SIZE + 4096, dtype=np.uint8) for _ in range(2)]
    with pytest.raises(RedisError, match=r"get at .*: WRONGTYPE"):
        storage.get([key_of(1), key_of(2)], [[each] for each in room])
    assert read(storage, 2) is None
    storage.delete([key_of(1)])
    assert put(storage, 1) == [True]
    storage.close()


@pytest.mark.parametrize("most", [1, 4096, 70_001])
def test_calls_that_bring_less_than_they_should(shared, most):
    """Sockets take and give as much as they like."""
    size = 300 if most == 1 else SIZE
    storage = made(shared.params, namespace=f"less-{most}")
    (connection,) = storage._free

    class Slow(socket.SocketIO):
        def write(self, part):
            return super().write(part[:most])

        def readinto(self, room):
            return super().readinto(memoryview(room)[:most])

    raw = Slow(connection._socket, "rw")
    connection._in = io.BufferedReader(raw)
    connection._out = io.BufferedWriter(raw)
    place = page(1, size)
    assert list(storage.put([key_of(1)], [place])) == [True]
    assert read(storage, 1, size) is None
    assert storage.exists([key_of(1), key_of(2)]) == 1
    storage.close()


@pytest.mark.nightly
def test_writers_that_are_killed_leave_whole_pages_or_none(shared):
    params = {**shared.params, "namespace": "killed"}
    storage, draw, whole = made(params), random.Random(1), 0
    for _ in range(6):
        writer = start(PROGRAM, "write", json.dumps(params))
        try:
            assert writer.stdout.readline() == "begun\n"
            time.sleep(draw.random() * 0.05)
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        for number in range(8):
            problem = read(storage, number)
            assert problem in (None, "absent"), problem
            whole += problem is None
    assert whole >= 6 * 4, "what nobody deletes is gone"
    storage.close()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"address": None}, "address of redis must be a text, got None"),
        (
            {"address": "here"},
            "address of redis must be an address such as '10.0.0.1:6379' or 'unix:/run",
        ),
        ({"address": "unix:here"}, "address of redis must be an address"),
        ({"username": "me"}, "username needs a password, in params or in the environment"),
        ({"username": 1, "password": "x"}, "username of redis must be a text or None, got 1"),
        ({"password": 5}, "password of redis must be a text or None that it takes, got int"),
        ({"database": -1}, "database of redis must be >= 0, got -1"),
        (
            {"namespace": "a*"},
            "namespace of redis must match regex '[A-Za-z0-9._-]+' ('a*' doesn't)",
        ),
        ({"expire_s": 0}, "expire_s of redis must be > 0, got 0"),
        ({"timeout_s": True}, "timeout_s of redis must be a number, got True"),
    ],
)
def test_parameters_that_are_wrong_are_refused(params, reason):
    """Before anybody is called."""
    with pytest.raises(ConfigError) as refused:
        made({"address": "unix:/nowhere", **params})
    (reported,) = refused.value.reasons
    assert reason in reported
