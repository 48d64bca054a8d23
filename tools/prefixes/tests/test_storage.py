"""Pages below host memory: what comes back is what was there, or is computed again."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from storage_driver import PROMPT, QUERIES, ROWS, run, stored

from tests.machines.engine_pages import run_forward
from tests.machines.storage import (
    run_evicted,
    run_overtaken,
    run_reloaded,
    run_storage,
)
from topkv.errors import HostMemoryError
from topkv_prefixes import calls, fetching
from topkv_prefixes.fetching import Fetch
from topkv_prefixes.places import fingerprint_of
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier


@pytest.fixture
def make(make_stored):
    return make_stored


@pytest.mark.slow
def test_requests_go_on_as_if_they_had_computed_what_was_stored(on):
    fetched = run_storage(on, cpu=48, interpret=4)
    assert fetched > 24 or on.name == "interpret"


@pytest.mark.parametrize(
    "options",
    [
        {"page_tokens": 8},
        {"host_format": "fp8"},
        {"layers": {"0-2": "resident"}},
    ],
    ids=str,
)
def test_whatever_pages_look_like(options):
    assert run_storage(tier("cpu"), cpu=26, **options) > 5


@pytest.mark.parametrize("run", [run_overtaken, run_reloaded, run_evicted])
def test_scenes(on, run):
    run(on)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_another_process_finds_what_was_stored(make, shelf, write):
    first = make(write=write)
    found, cold = run(first)
    assert found == 0
    first.close()
    assert len(shelf.objects) == 7
    second = make()
    found, warm = run(second)
    assert found == 28
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)
    counts = stored(second)
    assert (counts.found, counts.fetched, counts.stored, counts.damaged) == (28, 7, 0, 0)
    assert counts.fetched_bytes == sum(map(len, shelf.objects.values()))
    assert run(second)[0] == 28  # in host memory now
    assert stored(second).fetched == 7


def test_what_was_seen_twice_is_stored(make, shelf):
    coordinator = make(write="write_through_selective")
    run(coordinator, PROMPT[:13])
    assert stored(coordinator).stored == 0
    run(coordinator)
    assert stored(coordinator).stored == 3
    run(coordinator)
    assert stored(coordinator).stored == 7


def test_what_leaves_the_host_is_stored(make, shelf):
    coordinator = make({"max_tokens": 48, "max_requests": 1}, write="write_back")
    _, cold = run(coordinator)
    assert not shelf.objects
    run(coordinator, [*range(40)])  # needs their pages
    counts = stored(coordinator)
    assert 0 < counts.stored < 7 + 10
    assert coordinator.keeper.counts.evicted == counts.stored
    found, warm = run(coordinator)
    assert found > 0
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "params"),
    [({"page_tokens": 8}, {}), ({"host_format": "fp8"}, {}), ({}, {"keep": "prompt"})],
    ids=str,
)
def test_another_configuration_finds_nothing(make, options, params):
    run(make())
    stored(make())
    assert run(make(options, params))[0] == 0


def test_tenants_and_what_was_forgotten_find_nothing(make):
    first = make()
    run(first)
    stored(first)
    other = make()
    assert run(other, salt=b"x")[0] == 0
    other.keeper.forget()
    assert run(other, PROMPT)[0] == 0
    kept = make()
    kept.keeper.forget(stored=False)
    assert run(kept)[0] == 28


def test_pages_of_shared_selections_are_others():
    found = set()
    for share in ("F", "FS"):
        coordinator = make_coordinator(tier("cpu"), layers={"0-": "scripted"}, share=share)
        found.add(fingerprint_of(coordinator.config, coordinator.manager, "all"))
        coordinator.close()
    assert len(found) == 2


def test_a_prompt_that_may_not_wait_is_computed(make, shelf):
    run(make())
    stored(make())
    gate, began = threading.Event(), threading.Event()

    def before(call, keys):
        if call == "get":
            began.set()
            gate.wait(60)

    shelf.before = before
    late = make(fetch="timeout", wait_s=0.05, wait_s_per_1k=0)
    since = time.monotonic()
    _, outputs = run(late)
    assert time.monotonic() - since < 30  # and not until the gate opens
    assert began.is_set()
    counts = late.keeper.counts.storage
    assert (counts.late, counts.found) == (1, 0)
    host = late.manager.host
    assert len(host.lent) == 7  # a thread may still write them
    gate.set()
    while late.keeper.poll() or host.lent:
        pass
    assert host.used == 0
    check_integrity(late)
    shelf.before = lambda call, keys: None
    torch.testing.assert_close(outputs, run(make(params={"keep": "prompt"}))[1], rtol=0, atol=0)


def test_a_thread_may_end_while_pages_are_tidied_up(make):
    class Batch:
        """Its thread ends as soon as somebody has asked whether it has."""

        def __init__(self, pages):
            self.pages, self.asked = pages, 0

        @property
        def good(self):
            self.asked += 1
            return [True] * len(self.pages) if self.asked > 1 else None

    coordinator = make()
    host = coordinator.manager.host
    pages = host.lease(3)
    host.lend(pages)
    fetch = Fetch(coordinator.keeper.storage._shared, [], [], 0, stragglers=[Batch(pages)])
    assert not fetch.tidy()
    assert host.lent
    assert fetch.tidy()
    assert not host.lent
    assert host.used == 0


def test_who_waits_for_nothing_takes_what_was_prefetched(make, shelf):
    run(make())
    stored(make())
    coordinator = make(fetch="best_effort")
    assert run(coordinator, PROMPT[:13])[0] == 0
    coordinator.keeper.forget(stored=False)
    coordinator.keeper.prefetch(PROMPT)
    while coordinator.keeper.poll():
        time.sleep(0.001)
    assert run(coordinator)[0] == 28


def test_what_nobody_waits_for_leaves_most_threads_alone(make, shelf, monkeypatch):
    """Others decode meanwhile, and have work with each call; who waits has all of them begin."""
    run(make())
    stored(make())
    asked, ask = [], Fetch._ask
    monkeypatch.setattr(fetching, "BATCH_BYTES", 1)
    monkeypatch.setattr(Fetch, "_ask", lambda fetch: asked.append(fetch) or ask(fetch))
    gate = threading.Event()
    shelf.before = lambda call, keys: gate.wait(60) if call == "get" else None
    coordinator = make(fetch="timeout", wait_s=0.05, wait_s_per_1k=0)
    host = coordinator.manager.host
    coordinator.keeper.prefetch(PROMPT)
    while not host.lent:
        assert coordinator.keeper.poll() == 1
    for _ in range(3):
        assert coordinator.keeper.poll() == 1
        assert len(asked) == len(host.lent) == 2
    slot = coordinator.keeper.begin(PROMPT)
    assert len(asked) == 7
    gate.set()
    coordinator.request_end(slot)
    while coordinator.keeper.poll() or host.lent:
        pass


def test_what_is_prefetched_for_a_tenant_is_its_own(make):
    """Whoever looks when it comes, and within its quota."""
    first = make()
    with first.keeper.tenant("x"):
        run(first)
        stored(first)
    host = first.manager.host
    size = host.bytes.numel() // host.num_pages
    coordinator = make(params={"quotas": {"x": 3 * size}})
    with coordinator.keeper.tenant("x"):
        coordinator.keeper.prefetch(PROMPT)
    while coordinator.keeper.poll():
        time.sleep(0.001)
    assert run(coordinator)[0] == 0
    with coordinator.keeper.tenant("x"):
        assert coordinator.keeper.length(PROMPT) == 12
        assert run(coordinator)[0] == 28


def test_a_prefetch_gives_way_to_requests(make, shelf):
    run(make())
    stored(make())
    gate = threading.Event()
    shelf.before = lambda call, keys: gate.wait(60) if call == "exists" else None
    coordinator = make({"max_tokens": 32, "max_requests": 1, "max_request_tokens": 32})
    coordinator.keeper.prefetch(PROMPT)
    gate.set()
    host = coordinator.manager.host
    while not host.lent:
        coordinator.keeper.poll()
    slot = coordinator.request_begin()
    coordinator.reserve(slot, 32)
    with pytest.raises(HostMemoryError):
        coordinator.reserve(slot, 40)
    coordinator.request_end(slot)
    assert not host.used


@pytest.mark.parametrize("call", ["exists", "get", "put", "delete"])
def test_a_storage_that_fails_is_left_alone(make, shelf, monkeypatch, caplog, call):
    monkeypatch.setattr(calls, "FIRST_PAUSE", 3600.0)
    expected = run(make())[1]
    stored(make())
    for key, held in shelf.objects.items():
        shelf.objects[key] = held[:-1] + bytes([held[-1] ^ 1]) if call == "delete" else held
    asked = []

    def before(name, keys):
        if name == call:
            asked.append(name)
            raise OSError("the cable is out")

    shelf.before = before
    coordinator = make()
    for number in range(6):
        found, outputs = run(coordinator, salt=bytes([number]) if call == "put" else b"")
        assert found in (0, 28)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
        stored(coordinator)
        coordinator.keeper.forget(stored=False)
    assert 1 <= len(asked) <= calls.FAILURES
    assert "the cable is out" in coordinator.keeper.storage.reason
    assert coordinator.keeper.counts.storage.failed == len(asked)
    reported = [record for record in caplog.records if record.name.startswith("topkv")]
    assert len(reported) == (len(asked) == calls.FAILURES)
    for record in reported:
        assert record.levelname == "WARNING"
        assert f"last failed in {call}: OSError: the cable is out" in record.getMessage()


def test_a_call_that_hangs_ends_no_wait_but_its_own(make, shelf):
    gate = threading.Event()
    shelf.before = lambda call, keys: gate.wait(60)
    coordinator = make(fetch="wait_complete", limit_s=0.1)
    since = time.monotonic()
    assert run(coordinator)[0] == 0
    with pytest.warns(RuntimeWarning, match="1 calls hang and are left behind"):
        coordinator.close()
    assert time.monotonic() - since < 30
    gate.set()


def test_a_full_storage_keeps_a_beginning(make, shelf):
    shelf.limit = 3
    first = make()
    run(first)
    counts = stored(first)
    assert (counts.stored, counts.dropped, counts.failed) == (3, 4, 0)
    assert run(make())[0] == 12


@pytest.mark.parametrize("lie", [-5, 0, 3, 99, "all"])
def test_what_exists_is_believed_as_a_hint(make, shelf, monkeypatch, lie):
    run(make())
    stored(make())
    coordinator = make()
    reported = lambda keys: len(keys) if lie == "all" else lie  # noqa: E731
    monkeypatch.setattr(coordinator.keeper.storage._storage, "exists", reported)
    for key in sorted(shelf.objects)[:1]:
        del shelf.objects[key]
    assert run(coordinator)[0] <= 28


def test_a_page_that_is_written_while_it_is_stored_is_not_stored(make, shelf):
    coordinator = make()
    begun, gate = threading.Event(), threading.Event()

    def before(call, keys):
        if call == "put":
            begun.set()
            gate.wait(60)

    shelf.before = before
    slot = coordinator.request_begin()
    run_forward(coordinator, [slot], [], {slot: ROWS[:30]}, QUERIES[:, :30])
    coordinator.keeper.publish(slot, PROMPT)
    assert begun.wait(60)
    coordinator.truncate(slot, 14)  # the checksums are made
    run_forward(coordinator, [slot], [], {slot: ROWS[40:56]}, QUERIES[:, :16])
    gate.set()
    counts = stored(coordinator)
    assert (counts.stored, counts.dropped, len(shelf.objects)) == (3, 4, 3)
    coordinator.request_end(slot)
    assert run(make())[0] == 12


def test_an_interrupt_leaks_nothing(make, shelf, monkeypatch):
    run(make())
    stored(make())
    coordinator = make(fetch="wait_complete")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.keeper.storage._calls.changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(coordinator)
    while coordinator.manager.host.lent:
        coordinator.keeper.poll()
    assert coordinator.manager.host.used == 0
    assert run(coordinator)[0] == 28
