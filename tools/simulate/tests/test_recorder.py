"""Recordings: their content, refusals, and a coordinator that is left as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from topkv.errors import CapabilityError, RequestError
from topkv_simulate.recorder import recording
from topkv_simulate.replay import Replayer
from topkv_simulate.trace import KIND, ROW
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    make_coordinator,
)
from topkv_testing.tiers import tier


@pytest.fixture
def coordinator():
    made = make_coordinator(tier("cpu"))
    yield made
    made.close()


def forward(coordinator, rows, **what):
    coordinator.forward_begin(**what)
    attend(coordinator, rows)
    coordinator.forward_end()


def attend(coordinator, rows, layers=range(LAYERS)):
    for layer in layers:
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        coordinator.attention(layer, *(torch.ones(rows, heads, DIM) for heads in sizes))


def choose(coordinator, units):
    for path in coordinator.layers:
        if path.algorithm:
            path.algorithm.next_ids[path.view.layer] = torch.tensor([units], dtype=torch.int32)


def bound(coordinator):
    """List everything that a recorder replaces by wrappers."""
    return [*coordinator.transfers, *coordinator.requests.transfers] + [
        path.transfer for path in coordinator.layers
    ]


def test_rows_ids_and_events_are_those_of_the_steps(coordinator):
    choose(coordinator, [3, 9, 0])
    with recording(coordinator) as recorder:
        slot = coordinator.request_begin()
        forward(coordinator, 9, prefill=[(slot, 9)])
        forward(coordinator, 2, decode=[-1, slot])
        choose(coordinator, [1, 1, 2])
        forward(coordinator, 1, decode=[slot], append=[False])
        coordinator.request_end(slot)
    trace = recorder.trace()
    # Round, slot, length, high, appended, resident, warm: padded rows are left out.
    assert trace.rows.tolist() == [
        [0, 0, 9, 9, 0, 1, 1],
        [1, 0, 10, 10, 1, 1, 0],
        [2, 0, 10, 10, 0, 1, 0],
    ]
    (group,) = trace.groups
    assert (group.ids[:2] == [3, 9, 0]).all()
    assert (group.ids[2] == [1, 1, 2]).all()
    assert group.limits.tolist() == [4, 4, 4]
    assert group.counts[:, 0, 0].tolist() == [[2, 0], [2, 0], [2, 0]]
    kinds = [KIND(kind).name for kind in trace.events[:, 0]]
    # The prompt, its open unit when it is settled, the step's tokens, and the end.
    assert kinds == ["WRITE", "PLAN", "PLAN", "CLOSE", "PLAN", "RESET"]
    Replayer(trace).check()


def test_the_coordinator_is_left_as_it_was(coordinator):
    before = bound(coordinator)
    with recording(coordinator):
        sparse = {id(each) for each in bound(coordinator)} - {id(each) for each in before}
        assert len(sparse) == 1
    assert all(one is other for one, other in zip(bound(coordinator), before, strict=True))

    class Dropped(Exception):
        """An error of the user's own code."""

    with pytest.raises(Dropped), recording(coordinator):
        raise Dropped
    assert all(one is other for one, other in zip(bound(coordinator), before, strict=True))


def test_dropped_forwards_are_recorded(coordinator):
    """The layers that had not run selected nothing, and what had been loaded is forgotten."""
    with recording(coordinator) as recorder:
        slot = coordinator.request_begin()
        forward(coordinator, 33, prefill=[(slot, 33)])
        coordinator.settle([slot])  # selects nothing
        choose(coordinator, [7, 5, 4])
        coordinator.forward_begin(decode=[slot])
        attend(coordinator, 1, range(2))
        coordinator.forward_abort()
        forward(coordinator, 1, decode=[slot])
    trace = recorder.trace()
    Replayer(trace).check()
    counts = trace.groups[0].counts[trace.rows[:, ROW.warm] == 0]
    assert counts[0, 1].tolist() == [[0, 0], [0, 0]]
    assert counts[1].tolist() == counts[0, [0, 0]].tolist() == [[[0, 3], [0, 3]]] * 2


def test_requests_that_are_warmed_one_after_the_other_are_two_rounds(coordinator):
    with recording(coordinator) as recorder:
        slots = [coordinator.request_begin() for _ in range(2)]
        for slot in slots:
            forward(coordinator, 9, prefill=[(slot, 9)])
        for slot, unit in zip(slots, (1, 2), strict=True):
            choose(coordinator, [unit, -1, -1])
            coordinator.settle([slot])
    trace = recorder.trace()
    assert trace.rows[:, [ROW.round, ROW.slot, ROW.warm]].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert trace.groups[0].ids[:, :, :, 0].tolist() == [[[1, 1]] * 2, [[2, 2]] * 2]
    Replayer(trace).check()


def test_requests_that_are_there_are_refused(coordinator):
    coordinator.request_begin()
    with pytest.raises(RequestError, match="before the first request"):
        recording(coordinator).__enter__()


def test_steps_that_come_past_are_refused(coordinator):
    """Steps of a graph that was captured before launch kernels, and call nobody."""
    before = bound(coordinator)
    choose(coordinator, [0, 1, 2])
    slot = coordinator.request_begin()
    forward(coordinator, 9, prefill=[(slot, 9)])
    coordinator.request_end(slot)
    path = coordinator.layers[0]
    engine = path.transfer

    def steps(ends):
        with recording(coordinator):
            slot = coordinator.request_begin()
            forward(coordinator, 9, prefill=[(slot, 9)])
            coordinator.forward_begin(decode=[slot])
            attend(coordinator, 1)
            engine.plan(
                path.view,
                path.lanes.selection.ids,
                path.lanes.limit,
                path.lanes.plans[path.loads.number],
            )
            coordinator.forward_end()
            if ends:
                coordinator.request_end(slot)

    for ends in (True, False):
        with pytest.raises(RequestError, match=r"slots \[0\] hit or missed units"):
            steps(ends)
    assert all(one is other for one, other in zip(bound(coordinator), before, strict=True))


def test_a_model_whose_layers_are_dense_is_refused():
    made = make_coordinator(tier("cpu"), layers={"0-3": "resident"})
    with pytest.raises(CapabilityError, match="all layers are dense"):
        recording(made).__enter__()
    made.close()


def test_queries_that_select_for_themselves_are_refused():
    coordinator = make_coordinator(tier("cpu"), max_queries=2, verification="exact", ring_tokens=6)
    refused = pytest.raises(CapabilityError, match="set verification to 'joint'")
    with refused, recording(coordinator):
        pass
    coordinator.close()


def test_a_recording_of_nothing_is_a_trace(coordinator):
    with recording(coordinator) as recorder:
        pass
    trace = recorder.trace()
    assert trace.rows.shape == (0, len(ROW))
    assert trace.groups[0].ids.shape == (0, 2, 2, trace.groups[0].geometry.select)
    assert np.array_equal(trace.events, np.zeros((0, 6)))
    Replayer(trace).check()


def test_a_step_of_several_tokens_closes_every_unit_that_it_fills():
    """A request that fits its buffer finds them there, long after they have left the ring."""
    coordinator = make_coordinator(tier("cpu"), max_queries=7, ring_tokens=10)
    try:
        with recording(coordinator) as recorder:
            slot = coordinator.request_begin()
            choose(coordinator, [0, 1, 2])
            forward(coordinator, 3, prefill=[(slot, 3)])
            forward(coordinator, 7, decode=[slot], queries=7)  # 3 to 10 tokens: units 1 to 4
            coordinator.rollback(slot, 9)
            forward(coordinator, 7, decode=[slot], queries=7, append=[4])
            choose(coordinator, [1, 2, 3])
            forward(coordinator, 7, decode=[slot], queries=7, append=[5])
        trace = recorder.trace()
    finally:
        coordinator.close()
    assert trace.rows[trace.rows[:, ROW.warm] == 0][:, ROW.appended].tolist() == [7, 4, 5]
    closed = trace.events[trace.events[:, 0] == KIND.CLOSE]
    assert closed[:, 2:4].tolist() == [[3, 10], [9, 13], [13, 18]]
    assert trace.groups[0].counts[-1, 0, 0].tolist() == [3, 0]
    Replayer(trace).check()
