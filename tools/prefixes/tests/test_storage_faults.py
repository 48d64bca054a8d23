"""Storages that answer wrongly, end threads, or are taken into a fork: no wait is without end."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from storage_driver import PROMPT, run, stored

from tests.machines.handed_over import on_a_shelf, run_interrupted
from tests.machines.storage_faults import (
    in_a_child,
    in_time,
    run_answered_wrongly,
    run_forked,
)
from topkv.errors import StorageError
from topkv_prefixes import calls, fetching, tier
from topkv_prefixes.calls import Workers, answer_of
from topkv_prefixes.storage import StorageUsage
from topkv_testing.integrity import check_integrity

WHO = r"topkv-doubles \S+ \(storage 'shelf'\)"


def raising(error):
    def call(*arguments):
        raise error

    return call


def spoilt(keys, places=()):
    yield True
    raise OSError("half way")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


WRONG = {
    "true": lambda *arguments: True,
    "none": lambda *arguments: None,
    "text": lambda keys, *places: "y" * len(keys),
    "nones": lambda keys, *places: [None] * len(keys),
    "few": lambda keys, *places: [True] * (len(keys) - 1),
    "endless": lambda keys, *places: iter(lambda: True, 7),
    "rows": lambda keys, *places: np.ones((len(keys), 2), dtype=bool),
    "half way": spoilt,
    "exit": raising(SystemExit(3)),
    "interrupt": raising(KeyboardInterrupt()),
    "unprintable": raising(Unprintable()),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("hook", ["exists", "get", "put"])
def test_a_wrong_answer_has_failed_and_nobody_waits(make_stored, shelf, monkeypatch, hook, wrong):
    expected = run(make_stored())[1]
    stored(make_stored())
    coordinator = make_stored(fetch="wait_complete")
    monkeypatch.setattr(coordinator.keeper.storage._storage, hook, WRONG[wrong])
    salt = b"x" if hook == "put" else b""
    found = []
    in_time(lambda: found.append(run(coordinator, salt=salt)))
    ((_, outputs),) = found
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    in_time(lambda: stored(coordinator))
    counts = coordinator.keeper.counts.storage
    assert counts.failed == 1
    assert counts.found == (28 if hook == "put" and not salt else 0)
    assert counts.dropped == (7 if hook == "put" else 0)
    assert coordinator.keeper.storage.reason.startswith("topkv-doubles ")
    assert f"(storage 'shelf'): {hook}: " in coordinator.keeper.storage.reason
    in_time(coordinator.close)


@pytest.mark.parametrize("module", [tier, fetching], ids=lambda each: each.__name__)
def test_what_fails_in_a_thread_beside_hooks_is_counted(make_stored, shelf, monkeypatch, module):
    run(make_stored())
    stored(make_stored())
    coordinator = make_stored(fetch="wait_complete")
    name = "write_header" if module is tier else "problem_of"
    monkeypatch.setattr(module, name, raising(MemoryError("no room for a checksum")))
    for number in range(3):
        salt = bytes([number]) if module is tier else b""
        in_time(partial(run, coordinator, salt=salt))
        coordinator.keeper.forget(stored=False)
        in_time(lambda: stored(coordinator))
    counts = coordinator.keeper.counts.storage
    assert counts.failed == 3
    assert counts.found == 0
    assert "a thread: MemoryError: no room for a checksum" in coordinator.keeper.storage.reason
    assert not coordinator.keeper.storage._calls.available
    in_time(coordinator.close)


@pytest.mark.parametrize("how", [ValueError("stuck"), SystemExit(1)], ids=type)
def test_a_close_that_fails_is_reported(make_stored, shelf, monkeypatch, how):
    coordinator = make_stored()
    run(coordinator)
    monkeypatch.setattr(coordinator.keeper.storage._storage, "close", raising(how))
    with pytest.warns(RuntimeWarning, match=rf"{WHO}: close: {type(how).__name__}"):
        coordinator.close()
    assert coordinator.keeper.counts.storage.failed == 1
    assert len(shelf.objects) == 7


def test_a_close_that_hangs_is_left_behind(make_stored, shelf, monkeypatch):
    coordinator, gate = make_stored(limit_s=0.2), threading.Event()
    monkeypatch.setattr(coordinator.keeper.storage._storage, "close", lambda: gate.wait(60))
    with pytest.warns(RuntimeWarning, match="1 calls hang and are left behind"):
        coordinator.close()
    gate.set()


def test_a_job_that_raises_ends_no_thread():
    reported, done = [], threading.Event()
    workers = Workers(1, reported.append)
    for error in (ValueError(1), SystemExit(2)):
        workers.add(raising(error))
    workers.add(done.set)
    assert done.wait(60)
    assert [type(error) for error in reported] == [ValueError, SystemExit]
    workers.close()
    workers.add(done.clear)
    assert workers.left == 0
    assert done.is_set()


@pytest.mark.parametrize(
    ("hook", "answer", "expected"),
    [
        ("exists", np.int64(2), 2),
        ("exists", -5, -5),
        ("get", np.array([True, False]), [True, False]),
        ("put", (1, np.bool_(False)), [True, False]),
        ("put", iter([True, True]), [True, True]),
        ("usage", StorageUsage(1, 2), StorageUsage(1, 2)),
        ("delete", "anything", "anything"),
    ],
)
def test_right_answers_have_one_form(hook, answer, expected):
    arguments = [] if hook == "usage" else [[b"a", b"b"]]
    found = answer_of(hook, arguments, answer)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_child_leaves_the_storage_to_its_parent(make_stored, shelf, write):
    """Whatever waits for threads, and whoever holds their locks."""
    expected = run(make_stored())[1]
    stored(make_stored())
    coordinator = make_stored(fetch="wait_complete", write=write)
    gate, begun = threading.Event(), threading.Event()

    def before(call, keys):
        begun.set()
        gate.wait(60)

    shelf.before = before
    coordinator.keeper.prefetch(PROMPT)
    assert begun.wait(60)
    held, locked = threading.Event(), threading.Event()

    def hold():
        with coordinator.keeper.storage._calls.changed:
            locked.set()
            held.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60)

    def life():
        assert coordinator.keeper.poll() == 0
        assert not coordinator.manager.host.lent
        found, outputs = run(coordinator)
        assert found == 0
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
        assert coordinator.keeper.storage.reason.endswith("this one was forked from")
        coordinator.keeper.storage._storage.close = raising(AssertionError)
        coordinator.close()

    assert in_a_child(life)
    held.set()
    holder.join()
    shelf.before = lambda call, keys: None
    gate.set()
    assert run(coordinator)[0] == 28


def test_a_child_that_gets_pages_lets_go_of_them(make_stored, shelf):
    """These are pages that a thread of its parent was to fill."""
    run(make_stored())
    stored(make_stored())
    coordinator, gate = make_stored(), threading.Event()
    shelf.before = lambda call, keys: gate.wait(60) if call == "get" else None
    coordinator.keeper.prefetch(PROMPT)
    while not coordinator.manager.host.lent:
        coordinator.keeper.poll()

    def life():
        assert coordinator.keeper.poll() == 0
        assert coordinator.manager.host.used == 0
        check_integrity(coordinator)
        coordinator.close()

    assert in_a_child(life)
    assert coordinator.manager.host.lent
    gate.set()


def test_a_child_cannot_use_sessions_of_its_parent():
    with on_a_shelf() as (_, stored):
        stored["one"].write({}, [])

        def life():
            with pytest.raises(StorageError, match="was forked from; make another one"):
                stored["one"].read()
            stored._storage.close = raising(AssertionError)
            stored.close()

        assert in_a_child(life)
        assert stored["one"].read().document["rows"] == []


@pytest.mark.parametrize("hook", ["exists", "get", "put"])
def test_a_session_names_the_plugin_that_answers_wrongly(monkeypatch, hook):
    with on_a_shelf() as (_, stored):
        monkeypatch.setattr(stored._storage, hook, lambda *arguments: True)
        with pytest.raises(StorageError, match=rf"{WHO}: {hook}: TypeError: expected .*got True"):
            stored["one"].write({}, [])


@pytest.mark.parametrize("run", [run_answered_wrongly, run_forked, run_interrupted])
def test_scenes(on, run):
    run(on)


def test_the_pause_of_a_storage_that_answers_wrongly(make_stored, shelf, monkeypatch, caplog):
    monkeypatch.setattr(calls, "FIRST_PAUSE", 3600.0)
    coordinator = make_stored()
    monkeypatch.setattr(coordinator.keeper.storage._storage, "put", lambda *arguments: True)
    for number in range(6):
        run(coordinator, salt=bytes([number]))
        in_time(lambda: stored(coordinator))
    assert coordinator.keeper.counts.storage.failed == calls.FAILURES
    (reported,) = (record.getMessage() for record in caplog.records)
    assert reported.startswith("topkv-doubles ")
    assert "put: TypeError: expected true or false for each key, got True, of 7 keys" in reported
