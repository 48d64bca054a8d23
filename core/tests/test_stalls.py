"""Times of loads: each layer has its own, 0 where nothing was missed; off by default."""

from __future__ import annotations

import time

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from topkv.loads import TimedLoads
from topkv.transfer.stalls import DeviceClock, HostClock
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    make_coordinator,
)
from topkv_testing.tiers import tier

MISSED, HELD = (0, 1, 2), (3, 4, 5)
"""Units of a lane whose buffer holds five, and whose newest two are in the ring."""

TIERS = [
    pytest.param("cpu"),
    pytest.param("interpret"),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


def prompted(on, **options):
    """Make a coordinator with two requests that have outgrown their buffers, and their slots."""
    coordinator = make_coordinator(on, **options)
    slots = [coordinator.request_begin() for _ in range(2)]
    coordinator.forward_begin(prefill=[(slot, 22) for slot in slots])
    for layer in range(LAYERS):
        attend(coordinator, layer, 44)
    coordinator.forward_end()
    for slot in slots:
        coordinator.requests.fresh[slot] = False  # nothing is warmed: doubles select nothing
    return coordinator, slots


def attend(coordinator, layer, rows):
    generator = torch.Generator().manual_seed(layer)
    q, k, v = (
        torch.randn(rows, heads, DIM, generator=generator).to(coordinator.config.device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return coordinator.attention(layer, q, k, v)


def decode(coordinator, slots, units):
    """Run a step in which the lanes of each sparse layer select ``units[layer]``."""
    coordinator.forward_begin(decode=slots)
    outputs = []
    for layer in range(LAYERS):
        path = coordinator.layers[layer]
        if layer in SPARSE:
            ids = torch.full_like(path.lanes.ids, -1)
            chosen = torch.tensor(units[layer], dtype=torch.int32)
            ids[:, : len(chosen)] = chosen
            path.algorithm.next_ids[layer] = ids
        outputs.append(attend(coordinator, layer, len(slots)))
    coordinator.forward_end()
    return outputs


def stalls(coordinator):
    return {n: each.stall_ms for n, each in coordinator.transfers_of().layers.items()}


@pytest.mark.parametrize("name", TIERS)
def test_a_layer_that_missed_has_waited_and_no_other(name):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    coordinator, slots = prompted(on, stall_times=True)
    first, last = SPARSE[0], SPARSE[-1]
    assert stalls(coordinator) == dict.fromkeys(SPARSE, 0.0)
    decode(coordinator, slots, dict.fromkeys(SPARSE, MISSED))
    once = stalls(coordinator)
    assert all(stall > 0 for stall in once.values())
    decode(coordinator, slots, dict.fromkeys(SPARSE, MISSED))  # they are there now
    assert stalls(coordinator) == once
    decode(coordinator, slots, {first: MISSED, last: HELD})
    twice = stalls(coordinator)
    assert twice[first] == once[first]
    assert twice[last] > once[last]
    report = coordinator.transfers_of()
    assert report.stall_ms == sum(twice.values())
    assert coordinator.transfers_of(slots).stall_ms is None  # they are loaded together
    coordinator.close()


def test_what_passes_within_a_load_is_counted_to_its_layer():
    coordinator, slots = prompted(tier("cpu"), stall_times=True)
    slow, quick = SPARSE[0], SPARSE[-1]
    engine = coordinator.layers[slow].transfer
    load = engine.load

    def slowly(layer, plan):
        if layer.layer == slow:
            time.sleep(0.05)
        load(layer, plan)

    engine.load = slowly
    decode(coordinator, slots, dict.fromkeys(SPARSE, MISSED))
    found = stalls(coordinator)
    assert found[slow] >= 50 > found[quick] > 0
    coordinator.close()


def test_nobody_is_timed_unless_it_is_asked_for():
    plain, slots = prompted(tier("cpu"))
    watched, _ = prompted(tier("cpu"), stall_times=True)
    for coordinator in (plain, watched):
        for path in coordinator.layers:
            if path.view.layer in SPARSE:
                assert isinstance(path.loads, TimedLoads) == (coordinator is watched)
    for units in (MISSED, HELD):
        mine, theirs = (
            decode(each, slots, dict.fromkeys(SPARSE, units)) for each in (plain, watched)
        )
        assert all(map(torch.equal, mine, theirs))
    assert plain.transfers_of().misses == watched.transfers_of().misses > 0
    assert plain.transfers_of().stall_ms is None
    assert stalls(plain) == dict.fromkeys(SPARSE)
    more = watched.memory().metadata - plain.memory().metadata
    assert more == 16 * len(SPARSE)
    watched.check_integrity()
    for coordinator in (plain, watched):
        coordinator.close()


@triton.jit
def given_ns(p_now):
    """Stands in for the clock of a device: its time is stored behind those of the layer."""
    return tl.load(p_now + 2)


def test_the_kernels_add_what_the_host_adds(monkeypatch):
    """Equal over any misses of any number of lanes; the clock of both is set by hand."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    few = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    hits = st.sampled_from([0, 1, 254, 255, 256, 300, 520]).map(lambda count: [0] * count)
    lanes = st.builds(lambda before, missed, after: before + missed + after, hits, few, hits)
    looks = st.tuples(lanes, st.integers(0, 2**60), st.integers(0, 2**40))

    @given(st.lists(looks, max_size=4))
    def run(program):
        times, expected = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        kernels, host = DeviceClock(now=given_ns), HostClock()
        for lanes, began, took in program:
            misses = torch.tensor(lanes, dtype=torch.int32)
            for look, now in (("begin", began), ("end", began + took)):
                times[2] = now
                monkeypatch.setattr("topkv.transfer.stalls.perf_counter_ns", lambda now=now: now)
                rest = () if look == "begin" else (misses,)
                getattr(kernels, look)(times, *rest)
                getattr(host, look)(expected, *rest)
        assert torch.equal(times[:2], expected)

    run()
