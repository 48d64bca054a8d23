"""Sessions in a storage: whole and right, or an error that says what to do."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from tests.machines.handed_over import (
    leave,
    on_a_shelf,
    read_prompt,
    run_cut_short,
    run_damaged,
    run_handed_over,
    take,
)
from topkv.errors import ConfigError, PluginError, StorageError
from topkv_prefixes.stored import StoredSessions
from topkv_testing.machines.lifecycle_model import doubles


@pytest.fixture
def shelf():
    with on_a_shelf() as (shelf, stored):
        yield shelf, stored


BLOCKS = [
    {"a": torch.arange(24.0).view(2, 3, 4).transpose(0, 2), "b": torch.zeros(0, 3)},
    {"c": torch.tensor(7, dtype=torch.int64), "d": torch.ones(5, dtype=torch.bfloat16)},
    {"e": torch.tensor([True, False]), "f": torch.arange(99, dtype=torch.uint8)},
]


def record(place, rows=None):
    place.write({"said": [1, 2]}, rows or [({"length": 3}, BLOCKS), ({"length": 4}, [])])


def same(blocks, expected):
    blocks = list(blocks)
    assert len(blocks) == len(expected)
    for one, other in zip(blocks, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert one[name].shape == other[name].shape
            assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("piece", [1, 7, 96, 1 << 20])
def test_what_was_written_is_read(shelf, monkeypatch, piece):
    """Tensors of any shape and dtype, in objects of any size."""
    monkeypatch.setattr("topkv_prefixes.stored.PIECE", piece)
    shelf, stored = shelf
    record(stored["one"])
    record(stored["two"], [({}, BLOCKS[::-1])])
    for _ in range(2):
        found = stored["one"].read()
        assert found.document["said"] == [1, 2]
        assert [found.request(row) for row in (0, 1)] == [{"length": 3}, {"length": 4}]
        same(found.blocks(1), [])
        same(found.blocks(0), BLOCKS)
    same(stored["two"].read().blocks(0), BLOCKS[::-1])
    stored["one"].discard()
    stored["one"].discard()  # there is none
    same(stored["two"].read().blocks(0), BLOCKS[::-1])
    stored["two"].discard()
    assert not shelf.objects


@pytest.mark.parametrize("piece", [64, 1 << 20])
@pytest.mark.parametrize("host_format", ["model", "fp8"])
def test_a_request_goes_on_to_the_bit(on, monkeypatch, host_format, piece):
    monkeypatch.setattr("topkv_prefixes.stored.PIECE", piece)
    run_handed_over(on, host_format=host_format)


@pytest.mark.parametrize("run", [run_damaged, run_cut_short])
def test_scenes(on, monkeypatch, run):
    monkeypatch.setattr("topkv_prefixes.stored.PIECE", 4096)
    run(on)


def test_what_is_wrong_is_reported_with_what_to_do(shelf):
    shelf, stored = shelf
    with pytest.raises(StorageError) as refused:
        stored["none"].read()
    assert str(refused.value).startswith("the session 'none' in storage 'shelf' cannot be resumed")
    (reason,) = refused.value.reasons
    assert "head, object" in reason
    assert reason.endswith("it is not there; process the prompt again")
    record(stored["one"])
    held = dict(shelf.objects)
    with pytest.raises(StorageError, match="there is one of this name; discard it, or take"):
        record(stored["one"])
    assert shelf.objects == held
    keys = [*shelf.objects]
    for key in keys[:-2]:  # a manifest and a head come last
        shelf.objects[key] = held[key][:-1] + bytes([held[key][-1] ^ 1])
    with pytest.raises(StorageError, match=r"row 0, object .*its checksum is another one; pr"):
        list(stored["one"].read().blocks(0))
    del shelf.objects[keys[-2]]
    with pytest.raises(StorageError, match=r"manifest, object .*it is not there"):
        stored["one"].read()
    with pytest.raises(StorageError, match=r"cannot be discarded.*\n.*its head is removed"):
        stored["one"].discard()
    assert keys[-1] not in shelf.objects
    record(stored["one"])


def test_one_of_two_who_take_a_name_at_once_has_it(shelf):
    shelf, stored = shelf

    def slow():
        yield {}, BLOCKS
        record(stored["one"])  # somebody else is faster

    with pytest.raises(StorageError, match="there is one of this name"):
        record(stored["one"], slow())
    same(stored["one"].read().blocks(0), BLOCKS)
    stored["one"].discard()
    assert not shelf.objects


@pytest.mark.parametrize("call", ["exists", "put", "get"])
@pytest.mark.parametrize("number", range(4))
def test_a_storage_that_raises(shelf, call, number):
    """At each of its calls; what was stored until then is removed."""
    shelf, stored = shelf
    left = number

    def before(name, keys):
        nonlocal left
        left -= name == call
        if name == call and left < 0:
            raise OSError(5, "Input/output error")

    shelf.before = before
    calls = {"exists": 1, "put": 4, "get": 1}[call]
    if number < calls:
        with pytest.raises(
            StorageError, match=f"cannot be stored.*\n.*{call}: OSError"
        ) as reported:
            record(stored["one"])
        assert isinstance(reported.value.__cause__, OSError)
        # A head may have come all the same; it leads to nothing.
        assert len(shelf.objects) == (call == "get")
    else:
        record(stored["one"])


def test_what_could_not_be_removed_is_reported(shelf):
    shelf, stored = shelf

    def before(name, keys):
        if name == "delete" or len(shelf.objects) == 2:
            raise OSError(28, "No space left on device")

    shelf.before = before
    with pytest.raises(StorageError) as reported:
        record(stored["one"])
    (note,) = reported.value.__notes__
    assert note.startswith("3 objects of it may be left behind")


def test_a_storage_that_hangs_is_waited_for_no_longer_than_it_may(on):
    """And its late answer changes nothing."""
    gate = Event()
    with on_a_shelf(limit_s=0.3) as (shelf, stored):
        record(stored["one"])
        shelf.before = lambda name, keys: gate.wait(60)
        with pytest.raises(StorageError, match=r"get did not end within 0.3 s; raise limit_s"):
            stored["one"].read()
        with pytest.raises(StorageError, match=r"can be used no more: a call to it hangs \(get\)"):
            stored["one"].read()
        with pytest.warns(RuntimeWarning, match="a call hangs and is left behind"):
            stored.close()
        gate.set()
        with pytest.raises(StorageError, match="can be used no more"):
            stored["one"].read()


def test_an_interrupt_leaves_nothing(shelf, make):
    shelf, stored = shelf
    coordinator = make()
    slot, go_on = read_prompt(coordinator, 1)

    def interrupted():
        yield {}, BLOCKS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(stored["one"], interrupted())
    assert not shelf.objects
    leave(coordinator, slot, stored["one"])
    assert torch.equal(go_on(take(coordinator, stored["one"])), go_on(slot))


def test_close_waits_for_a_call_whose_caller_was_interrupted(shelf):
    shelf, stored = shelf
    inside, gate, ended = Event(), Event(), []

    def before(name, keys):
        inside.set()
        gate.wait(60)
        ended.append(name)

    shelf.before = before
    Thread(target=lambda: stored.ask("", "exists", []), daemon=True).start()
    assert inside.wait(60)
    closing = Thread(target=stored.close)
    closing.start()
    gate.set()
    closing.join(60)
    assert ended == ["exists"]


def test_what_cannot_be_opened_is_refused():
    registry = doubles()
    with pytest.raises(PluginError, match="unknown storage 'shelves'"):
        StoredSessions("shelves", registry=registry)
    with pytest.raises(ConfigError) as refused:
        StoredSessions("shelf", {"shelve": 1}, limit_s="long", registry=registry)
    parameter, limit = refused.value.reasons
    assert parameter == (
        "unknown parameter 'shelve' of topkv-doubles 1 (storage 'shelf'); did you mean 'shelf'?"
    )
    assert limit == "limit_s must be a number of seconds above 0, at most a day, got 'long'"
    for limit_s in (0, float("inf"), float("nan"), True):
        with pytest.raises(ConfigError, match="limit_s must be a number of seconds above 0"):
            StoredSessions("shelf", limit_s=limit_s, registry=registry)
    with on_a_shelf() as (_, stored):
        for name in ("", "\ud800", None, 7):
            with pytest.raises(ConfigError, match="a text that is not empty and that UTF-8 has"):
                stored[name]
