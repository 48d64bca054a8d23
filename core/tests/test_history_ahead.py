"""History that is fetched ahead of attention: the bits of history that is fetched in time."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from history_driver import Driver, prompts
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from topkv.decode.streams import SideStream
from topkv.prompts.ahead import PLACES, HistoryAhead
from topkv_testing.kit import examples
from topkv_testing.machines.delays import fetched_in_time
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    make_coordinator,
)

FORMATS = pytest.mark.parametrize("host_format", ["model", "fp8"])


def act(driver, data):
    """Do one thing that hypothesis draws."""
    draw, slots = data.draw, driver.slots
    if not slots or (len(slots) < 3 and draw(st.integers(0, 4)) == 0):
        driver.begin()
    slot = draw(st.sampled_from(slots), "slot")
    length = driver.coordinators[0].length(slot)
    match draw(
        st.sampled_from(["chunks"] * 5 + ["fork", "rollback", "truncate", "end"]), "action"
    ):
        case "chunks":
            named = draw(st.lists(st.sampled_from(slots), min_size=1, unique=True), "of")
            sizes = st.sampled_from([0, 1, 3, 8, 13])
            rows = [each for each in named[1:] if draw(st.booleans(), "decodes")]
            chunks = [(each, draw(sizes, "tokens")) for each in named if each not in rows]
            layers = draw(st.permutations(range(LAYERS)) | st.just(range(LAYERS)), "layers")
            drop = draw(st.integers(0, 3), "drop") == 0
            layers = layers[: draw(st.integers(0, LAYERS), "layers run")] if drop else layers
            driver.forward(rows, chunks, layers, drop)
        case "fork" if len(slots) < 4:
            twin = driver.call("fork", slot)
            if not isinstance(twin, str):
                slots.append(twin)
        case "rollback":
            driver.call("rollback", slot, max(0, length - draw(st.integers(0, 3), "back")))
        case "truncate":
            driver.call("truncate", slot, draw(st.integers(0, length), "to"))
        case "end":
            driver.call("request_end", slot)
            slots.remove(slot)


@FORMATS
def test_outputs_are_those_of_history_that_is_fetched_in_time(host_format, on):
    """Equal over chunks of several requests, decode beside them, forks, cuts, forwards dropped
    after any layer, layers in any order, and a prompt buffer of any size."""

    @examples(on, cpu=15, interpret=1, gpu=30)
    @given(st.data())
    def check(data):
        options = {"host_format": host_format, "resident_fast_path": data.draw(st.booleans())}
        buffer = data.draw(st.sampled_from([None, 7, 16, 24, 96]), "prompt buffer")
        sizes = {"prefill_buffer_tokens": buffer}, {}
        made = [make_coordinator(on, **options, **size) for size in sizes]
        driver = Driver(made[0], fetched_in_time(made[1]))
        try:
            for _ in range(data.draw(st.integers(3, 14), "steps")):
                act(driver, data)
            driver.compare()
        finally:
            for each in made:
                each.forward_abort()
            driver.close()

    check()


class Late(SideStream):
    """A side stream on a CPU that does its work when it is waited for, and not before."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.queue, self.done, self.inside = [], 0, False

    @contextlib.contextmanager
    def behind(self, *tensors):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def mark(self):
        return len(self.queue)

    def join(self, mark=None):
        mark = len(self.queue) if mark is None else mark
        while self.done < mark:
            self.queue[self.done]()
            self.done += 1

    def defer(self, call):
        def later(*args):
            return self.queue.append(partial(call, *args)) if self.inside else call(*args)

        return later


def late(coordinator):
    """Let history arrive at the last moment."""
    side = coordinator.prefill.ahead._side = Late()
    for transfer in coordinator.transfers:
        transfer.fetch = side.defer(transfer.fetch)
    return coordinator


def played(*coordinators):
    """Run ``prompts`` on all of these, and compare."""
    driver = Driver(*coordinators)
    try:
        prompts(driver)
        driver.compare()
    finally:
        for each in coordinators:
            each.forward_abort()
        driver.close()


@FORMATS
def test_history_that_comes_late_is_waited_for(make, host_format):
    options = {"host_format": host_format}
    more = options | {"prefill_buffer_tokens": 24}
    made = [late(make(**each)) for each in (options, more)]
    played(fetched_in_time(make(**options)), *made, make(**options))


def test_a_missing_wait_shows_when_history_comes_late(make, monkeypatch):
    whole = Late.join
    monkeypatch.setattr(
        Late, "join", lambda self, mark=None: whole(self) if mark is None else None
    )
    with pytest.raises(AssertionError, match="attention"):
        played(fetched_in_time(make()), late(make()))


def test_a_place_that_is_taken_too_early_shows(make, monkeypatch):
    """Fetch into the place of the block that is attended."""

    def blocks(self, *chunk):
        for block in real(self, *chunk):
            for number in range(len(self._spans) * len(self.paths)):
                self._fetch(number)
            yield block

    real = HistoryAhead.blocks
    monkeypatch.setattr(HistoryAhead, "blocks", blocks)
    with pytest.raises(AssertionError, match="attention"):
        played(fetched_in_time(make()), make())


def test_blocks_are_fetched_once_and_ahead(make):
    """Fetches follow the order of layers, then of chunks; none is behind the last block."""
    coordinator = make()
    calls = []
    for transfer in coordinator.transfers:
        transfer.fetch = lambda view, slot, start, k, v: calls.append((view.layer, slot, start))
    for path in coordinator.layers:
        path.backend.prefill = lambda *args: calls.append("attend")
    driver = Driver(coordinator)
    driver.begin()
    driver.begin()
    driver.forward(chunks=[(0, 11), (1, 5)])
    calls.clear()
    driver.forward(chunks=[(0, 2), (1, 3)])
    blocks = [(layer, *at) for layer in range(LAYERS) for at in ((0, 0), (0, 8), (1, 0))]
    assert [call for call in calls if call != "attend"] == blocks
    attended = 0
    for number, call in enumerate(calls):
        if call == "attend":
            fetched = [c for c in calls[:number] if c != "attend"]
            # A chunk is attended along with the last block of its history.
            assert len(fetched) == min(attended + PLACES, len(blocks))
            attended += 1
    assert attended == len(blocks)
    coordinator.close()


def test_what_the_prompt_buffer_has_is_not_fetched(make):
    """Fetched are tokens behind it, those of another request, and all again after a cut or a
    dropped forward; units that a chunk has begun are fetched whole."""
    coordinator, calls = make(prefill_buffer_tokens=16), []
    driver = Driver(coordinator)
    for transfer in coordinator.transfers:
        transfer.fetch = partial(
            lambda real, view, slot, start, k, v: (
                calls.append((slot, start, start + len(k))) if view.layer == 0 else None,
                real(view, slot, start, k, v),
            ),
            transfer.fetch,
        )

    def fetched(*chunks, **more):
        calls.clear()
        driver.forward(chunks=chunks, **more)
        return [*calls]

    driver.begin()
    driver.begin()
    assert fetched((0, 5)) == []
    assert fetched((0, 6), (1, 3)) == [(0, 4, 5)]
    assert fetched((0, 2)) == [(0, 10, 11)]
    assert fetched((0, 1), layers=range(2), drop=True) == [(0, 12, 13)]
    assert fetched((0, 1)) == [(0, 0, 8), (0, 8, 13)]
    driver.forward([0])
    assert fetched((0, 1)) == [(0, 14, 15)]
    driver.call("rollback", 0, 14)
    assert fetched((0, 1)) == []
    assert fetched((0, 3)) == [(0, 8, 15)], "this block and the chunk do not fit"
    assert fetched((0, 5)) == [(0, 8, 16), (0, 16, 18)]
    assert fetched((0, 1)) == [(0, 16, 23)]
    assert fetched((1, 1)) == [(1, 0, 3)]
    assert fetched((1, 1), (0, 1)) == [(0, 0, 8), (0, 8, 16), (0, 16, 24)]
    driver.close()


def test_the_prompt_buffer_is_counted(make):
    coordinators = [make(prefill_buffer_tokens=tokens) for tokens in (None, 40)]
    plain, more = (each.required_bytes(each.config, each.registry) for each in coordinators)
    row = 2 * KV_HEADS * DIM * 4
    assert more.device - plain.device == LAYERS * 48 * row, "rows come in sixteens"
    for each in coordinators:
        each.close()


def begun_again(coordinator, chunks, inputs):
    """Run a forward, dropped and begun again at each interrupt; return its outputs."""
    while True:
        try:
            coordinator.forward_begin(prefill=chunks)
            outs = [coordinator.attention(layer, *inputs[layer]) for layer in range(LAYERS)]
        except KeyboardInterrupt:
            coordinator.forward_abort()
            assert not coordinator.prefill.ahead._places, "nothing is on its way"
        else:
            coordinator.forward_end()
            return outs


@pytest.mark.parametrize("call", ["fetch", "prefill", "store_chunk"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 7, 8])
def test_a_forward_that_was_cut_short_can_be_done_again(make, monkeypatch, call, number):
    """Interrupt a call of its first layers, or its beginning."""
    cut = late(make(prefill_buffer_tokens=16 if number % 2 else None))
    whole = fetched_in_time(make())
    driver = Driver(cut, whole)
    driver.begin()
    driver.begin()
    driver.forward(chunks=[(0, 19), (1, 9)])
    calls = 0

    def counted(real, *args):
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*args)

    owners = [path.backend if call == "prefill" else path.transfer for path in cut.layers]
    for owner in {id(owner): owner for owner in owners}.values():
        monkeypatch.setattr(owner, call, partial(counted, getattr(owner, call)))
    chunks = [(1, 5), (0, 6)]
    inputs = [
        [torch.randn(11, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(LAYERS)
    ]
    outs = [begun_again(each, chunks, inputs) for each in (cut, whole)]
    assert calls > number
    assert all(map(torch.equal, *outs))
    driver.close()


def test_memory_goes_with_the_forward(make):
    for drop in (False, True):
        coordinator = make()
        driver = Driver(coordinator)
        driver.begin()
        driver.forward(chunks=[(0, 21)])
        coordinator.forward_begin(prefill=[(0, 5)])
        places = coordinator.prefill.ahead._places
        row = 2 * KV_HEADS * DIM * 4
        # a block and the chunk, filled up
        assert [place.nbytes for place in places] == [16 * row] * PLACES
        if drop:
            coordinator.forward_abort()
        else:
            for layer in range(LAYERS):
                coordinator.attention(layer, *(torch.zeros(5, n, DIM) for n in (4, 2, 2)))
            coordinator.forward_end()
        assert not coordinator.prefill.ahead._places
        coordinator.close()


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made within it."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                if storage.data_ptr() not in given:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


@FORMATS
def test_no_tensor_grows_with_what_is_stored(make, host_format):
    """A chunk takes tensors of equal sizes behind one block of history and behind many."""
    coordinator = make(host_format=host_format, max_tokens=512, max_request_tokens=256)
    driver = Driver(coordinator)
    driver.begin()
    driver.forward(chunks=[(0, 8)])
    largest = []
    for stored in (8, 240):
        while coordinator.length(0) < stored:
            driver.forward(chunks=[(0, 29)])
        with Largest() as made:
            driver.forward(chunks=[(0, 8)])
        largest.append(made.bytes)
    coordinator.close()
    few, many = largest
    assert few == many > 0
