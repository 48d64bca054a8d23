"""Times of loads: each layer has its own, 0 where nothing was missed."""

from __future__ import annotations

import time

import pytest
import torch

from core.tests import test_loads
from topkv_stalls.entry import topkv_register_observers
from topkv_stalls.observer import TimedLoads
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    doubles,
    make_coordinator,
)
from topkv_testing.tiers import tier

MISSED, HELD = (0, 1, 2), (3, 4, 5)
"""Units of a lane whose buffer holds five, and whose newest two are in the ring."""

TIMED = {"registry": doubles(*topkv_register_observers()), "observers": ["stalls"]}

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
            ids = torch.full_like(path.lanes.selection.ids, -1)
            chosen = torch.tensor(units[layer], dtype=torch.int32)
            ids[:, : len(chosen)] = chosen
            path.algorithm.next_ids[layer] = ids
        outputs.append(attend(coordinator, layer, len(slots)))
    coordinator.forward_end()
    return outputs


def stalls(coordinator):
    return coordinator.observers.counts["stalls"]()


@pytest.mark.parametrize("name", TIERS)
def test_a_layer_that_missed_has_waited_and_no_other(name):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    coordinator, slots = prompted(on, **TIMED)
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
    for slot in slots:
        coordinator.request_end(slot)
    assert stalls(coordinator) == twice
    coordinator.close()


def test_what_passes_within_a_load_is_counted_to_its_layer():
    coordinator, slots = prompted(tier("cpu"), **TIMED)
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


def test_outputs_and_counts_are_those_without_it():
    plain, slots = prompted(tier("cpu"))
    watched, _ = prompted(tier("cpu"), **TIMED)
    for coordinator in (plain, watched):
        for path in coordinator.layers:
            if path.view.layer in SPARSE:
                assert isinstance(path.loads, TimedLoads) == (coordinator is watched)
    for units in (MISSED, HELD):
        mine, theirs = (
            decode(each, slots, dict.fromkeys(SPARSE, units)) for each in (plain, watched)
        )
        assert all(map(torch.equal, mine, theirs))
    assert watched.transfers_of().misses > 0
    assert plain.transfers_of() == watched.transfers_of()
    assert "stalls" not in plain.observers.counts
    check_integrity(watched)
    for coordinator in (plain, watched):
        coordinator.close()


@pytest.mark.parametrize("name", [TIERS[0], TIERS[-1]])
@pytest.mark.parametrize(
    "compared",
    [
        pytest.param(test_loads.compared, id="shared"),
    ],
)
def test_layers_whose_copies_are_ahead_attend_to_the_same(name, compared):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    compared(on, **TIMED)


def test_a_model_without_sparse_layers_has_no_times():
    coordinator = make_coordinator(tier("cpu"), layers={"0-": "resident"}, **TIMED)
    assert stalls(coordinator) == {}
    coordinator.close()
