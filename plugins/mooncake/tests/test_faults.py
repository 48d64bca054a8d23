"""Holders and masters that are killed, absent, full or slow: misses and errors, never other
bytes."""

from __future__ import annotations

import signal
import sys
import time
from threading import Barrier, Event, Thread

import numpy as np
import pytest
from mooncake_cluster import free_port
from mooncake_pages import key_of, made, page, put, read

from topkv.errors import CapabilityError, ConfigError
from topkv_mooncake import client as clients
from topkv_mooncake.client import MooncakeError

SOON_S = 60.0
"""Seconds until what must happen at last has happened; no test depends on how long it took."""


def until(condition):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_holder_that_is_killed_leaves_misses_and_another_one_serves(make_cluster):
    cluster = make_cluster()
    holder = cluster.hold()
    storage = made(cluster.params)
    assert put(storage, 1, 2) == [True, True]
    cluster.kill(holder)
    with pytest.raises(MooncakeError, match=r"get: 1 of 1 objects: -800 \(the transfer failed"):
        read(storage, 1)
    with pytest.raises(MooncakeError, match=r"put: 1 of 1 objects: -800"):
        put(storage, 3)
    # What a holder had goes when the master misses its heartbeat.
    until(lambda: storage.exists([key_of(1)]) == 0)
    assert [read(storage, number) for number in (1, 2, 3)] == ["absent"] * 3
    cluster.hold()
    until(lambda: put(storage, 1) == [True])
    assert [read(storage, number) for number in (1, 2)] == [None, "absent"]
    storage.close()


@pytest.mark.slow
def test_a_batch_answers_for_objects_of_holders_that_are_there(make_cluster, caplog):
    """Objects of a holder that is gone are misses, and the log names them."""
    cluster = make_cluster()
    first = cluster.hold()
    storage = made(cluster.params)
    assert put(storage, 1) == [True]
    cluster.hold()
    numbers = [*range(2, 18)]  # a holder for each is drawn
    assert put(storage, *numbers) == [True] * 16
    cluster.kill(first)
    places = [[np.zeros(sum(map(len, page(n))), dtype=np.uint8)] for n in (1, *numbers)]
    done = storage.get([key_of(n) for n in (1, *numbers)], places)
    assert not done[0]
    assert any(done), "all sixteen were put to the first holder"
    for number, (place,), there in zip((1, *numbers), places, done, strict=True):
        assert not there or (place == np.concatenate(page(number))).all()
    assert f"get: {done.count(False)} of 17 objects: -800" in caplog.text
    storage.close()


@pytest.mark.slow
def test_a_master_that_is_killed_and_comes_back(make_cluster):
    cluster = make_cluster()
    cluster.hold()
    storage = made(cluster.params)
    assert put(storage, 1) == [True]
    cluster.kill(cluster.master)
    with pytest.raises(MooncakeError, match=r"exists: 1 of 1 objects: -900 \(the master does not"):
        storage.exists([key_of(1)])
    for call in (lambda: read(storage, 1), lambda: put(storage, 2)):
        with pytest.raises(MooncakeError, match="-900"):
            call()
    with pytest.raises(MooncakeError, match=r"delete: 1 of 1 objects: -900"):
        storage.delete([key_of(1)])
    with pytest.raises(MooncakeError, match=r"answers no questions at .*--metrics_port"):
        storage.usage()
    cluster.start_master()
    until(lambda: put(storage, 2) == [True])  # the holder has come back by itself
    assert [read(storage, number) for number in (1, 2)] == ["absent", None]
    storage.close()


@pytest.mark.slow
def test_a_store_that_is_full_says_no(make_cluster):
    cluster = make_cluster("--eviction_high_watermark_ratio=1", "--default_kv_lease_ttl=600000")
    cluster.hold("16 MB")
    storage = made(cluster.params)
    numbers = [*range(90)]
    done = [answer for number in numbers for answer in put(storage, number)]
    count = done.index(False)
    assert 40 < count < 90
    # The master makes room by what nobody reads; the rest stays as it was.
    found = [read(storage, number) for number in numbers]
    assert set(found) == {None, "absent"}
    assert not any(there is None for there, said in zip(found, done, strict=True) if not said)
    storage.delete([key_of(number) for number in numbers])
    until(lambda: put(storage, count) == [True])
    assert storage.usage().objects == 1
    huge = np.zeros(32 << 20, dtype=np.uint8)
    assert list(made(cluster.params, huge).put([key_of(99)], [[huge]])) == [False]
    storage.close()


@pytest.mark.slow
def test_nobody_is_there(make_cluster):
    cluster = make_cluster()
    storage = made(cluster.params)  # no holder
    assert put(storage, 1) == [False]
    assert read(storage, 1) == "absent"
    storage.close()
    port = free_port()
    with pytest.raises(ConfigError) as refused:
        made({"master": f"127.0.0.1:{port}"}, connect_s=1)
    (reason,) = refused.value.reasons
    assert f"no master answers at 127.0.0.1:{port} within 1.0 s" in reason
    assert f"start one there with `mooncake_master --rpc_port={port}`" in reason
    with pytest.raises(ConfigError, match=r"could not be set up at .*metadata 'http://127"):
        made(cluster.params, metadata=f"http://127.0.0.1:{port}/metadata")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"master": None}, "master of mooncake must be a text, got None"),
        (
            {"master": "here"},
            "master of mooncake must be an address such as '10.0.0.1:50051', got 'here'",
        ),
        ({"master": "here:0"}, "master of mooncake must be an address"),
        ({"admin": "9003"}, "admin of mooncake must be an address"),
        ({"host": ""}, "'host' must be"),
        ({"protocol": 1}, "protocol of mooncake must be a text, got 1"),
        ({"devices": 1}, "devices of mooncake must be a text, got 1"),
        ({"segment": "much"}, "segment of mooncake must be a positive number of bytes"),
        ({"buffer": 0}, "buffer of mooncake must be a positive number of bytes"),
        ({"replicas": 0}, "replicas of mooncake must be >= 1, got 0"),
        ({"namespace": "a,b"}, "namespace of mooncake must match regex"),
        ({"connect_s": 0}, "connect_s of mooncake must be > 0, got 0"),
    ],
)
def test_parameters_that_are_wrong_are_refused(shared, params, reason):
    """Wrong parameters are named all at once, and before anybody is called."""
    with pytest.raises(ConfigError) as refused:
        made({"master": "127.0.0.1:1", **params})
    assert len(refused.value.reasons) == 1
    assert reason in refused.value.reasons[0]
    with pytest.raises(ConfigError) as refused:
        made({"master": "127.0.0.1:1", **params}, metadata="")
    assert len(refused.value.reasons) == 2


def test_a_machine_without_mooncake_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(CapabilityError) as refused:
        made({})
    missing, tried = refused.value.reasons
    assert "pip install mooncake-transfer-engine-non-cuda" in missing
    assert "apt-get install libibverbs1 librdmacm1" in missing
    assert tried.startswith("mooncake.store: ModuleNotFoundError")


def test_a_mooncake_that_lacks_something_is_refused_by_its_name(monkeypatch):
    class MooncakeDistributedStore:
        def setup(self):
            """setup(self) -> int"""

        def batch_remove(self, keys):
            """batch_remove(self, keys: list[str]) -> list[int]"""

    module = type(sys)("mooncake.store")
    module.MooncakeDistributedStore = MooncakeDistributedStore
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    with pytest.raises(CapabilityError) as refused:
        made({})
    assert "mooncake.store: batch_remove takes no 'force'" in refused.value.reasons
    assert "mooncake.store: MooncakeDistributedStore has no get_size" in refused.value.reasons
    assert "mooncake.store: it has no ReplicateConfig" in refused.value.reasons


def test_parts_in_the_pool_and_elsewhere(shared):
    """Parts of one object are in both; bytes beside them stay. Batches are cut at the registered
    memory."""
    pool = np.full(64 * 4096, 7, dtype=np.uint8)
    storage = made(shared.params, pool, size=8000, buffer=9000, namespace="parts")
    random = np.random.default_rng(3)
    contents = [random.integers(0, 256, 10_000, dtype=np.uint8) for _ in range(20)]
    keys = [key_of(number) for number in range(20)]

    def places(cuts):
        """The first and the last part elsewhere, the middle in the pool."""
        return [
            [
                np.zeros(cuts[0], dtype=np.uint8),
                pool[number * 12_000 : number * 12_000 + 10_000 - sum(cuts)],
                np.zeros(cuts[1], dtype=np.uint8),
            ]
            for number in range(20)
        ]

    sent = places((3000, 1))
    for content, place in zip(contents, sent, strict=True):
        for part, piece in zip(place, np.split(content, [3000, 9999]), strict=True):
            part[:] = piece
    assert list(storage.put(keys, sent)) == [True] * 20
    pool[:] = 7
    got = places((5, 2500))
    assert list(storage.get(keys, got)) == [True] * 20
    for number, (content, place) in enumerate(zip(contents, got, strict=True)):
        assert (np.concatenate(place) == content).all()
        assert (pool[number * 12_000 + 7495 : (number + 1) * 12_000] == 7).all()
    assert storage.exists(keys) == 20
    storage.close()


def test_a_client_in_doubt_is_replaced_and_nobody_notices(shared, monkeypatch):
    """Every miss counts as one that took too long; eight threads go on meanwhile."""
    monkeypatch.setattr(clients, "DOUBTFUL_S", -1.0)
    closed, close = [], clients.Client.close

    def closing(self):
        assert self.users == 0, "a call is under way"
        closed.append(self)
        close(self)

    monkeypatch.setattr(clients.Client, "close", closing)
    storage = made(shared.params, namespace="doubt")
    assert put(storage, 1) == [True]
    together, problems = Barrier(8), []

    def run(thread):
        together.wait(60)
        for turn in range(3):
            number = 1 if (thread + turn) % 2 else 1000 + thread
            problems.append((number, read(storage, number)))

    threads = [Thread(target=run, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert {(min(number, 1000), problem) for number, problem in problems} == {
        (1, None),
        (1000, "absent"),
    }
    assert len(problems) == 24
    assert 0 < len(closed) == len({id(each) for each in closed})
    assert read(storage, 1) is None
    storage.close()


@pytest.mark.nightly  # a minute, most of it spent waiting
def test_nothing_is_written_once_a_call_has_returned(make_cluster):
    """A holder is suspended in the middle of a transfer, and wakes when the call is over."""
    cluster, count, size = make_cluster(), 48, 8 << 20
    holder = cluster.hold("512 MB")
    pool = np.random.default_rng(0).integers(1, 256, count * size, dtype=np.uint8)
    storage = made(cluster.params, pool, size=size)
    places = [[pool[at * size : (at + 1) * size]] for at in range(count)]
    keys = [key_of(number) for number in range(count)]
    assert list(storage.put(keys, places)) == [True] * count
    pool[:] = 0
    outcome, ended = [], Event()

    def get():
        try:
            outcome.append(storage.get(keys, places))
        except MooncakeError as error:
            outcome.append(error)
        ended.set()

    Thread(target=get, daemon=True).start()
    until(lambda: pool[::4096].any())
    holder.send_signal(signal.SIGSTOP)
    assert ended.wait(300)
    (answer,) = outcome
    assert isinstance(answer, MooncakeError) or not all(answer), "it was not stopped in time"
    pool[:] = 0
    holder.send_signal(signal.SIGCONT)
    other = made(cluster.params)
    until(lambda: put(other, 1) == [True])  # the holder is back
    time.sleep(2)
    assert not pool.any(), "memory was written when the call had returned"
    assert put(storage, 2) == [True]  # through another client
    assert [read(storage, number) for number in (1, 2)] == [None, None]
    for each in (storage, other):
        each.close()
