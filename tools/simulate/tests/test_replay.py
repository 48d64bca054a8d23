"""The simulator against the plan of the reference, one call at a time, and against brute force."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv.plugins import registry
from topkv_simulate.policies import BELADY, LRU, Installed, LeastRecentlyUsed
from topkv_simulate.recorder import recording
from topkv_simulate.replay import Lanes, Replayer, Wanted
from topkv_simulate.trace import KIND, Geometry, Group, Trace, TraceError
from topkv_testing import strategies
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    make_coordinator,
)
from topkv_testing.tiers import tier
from topkv_testing.transfer.bench import Row, TransferBench, group_shape

CPU = tier("cpu")
PROMPT = 9


def trace_of(shape, buffer, rows, events, ids, limits):
    """Make a trace of one group, whose recorded counts nobody looks at.

    Args:
        shape: options of ``group_shape``.
        buffer: slots that the trace says it was recorded with.
        rows: rows of the file.
        events: the leading columns of each.
        ids: ``[R, L, H, K]``.
    """
    geometry = Geometry(
        layers=tuple(range(shape["layers"])),
        unit=shape["unit"],
        lane_heads=shape["lane_heads"],
        select=shape["select"],
        buffer_slots=buffer,
        ring_slots=shape["ring"],
        max_units=shape["units"],
        entry_bytes=64,
        host_entry_bytes=64,
        budget=shape["select"] * shape["unit"],
        algorithm="none",
        params={},
    )
    ids = np.array(ids, np.int32).reshape(len(rows), shape["layers"], shape["lane_heads"], -1)
    padded = [[*event, *[0] * (6 - len(event))] for event in events]
    group = Group(
        geometry, ids, np.array(limits, np.int32), np.zeros((*ids.shape[:3], 2), np.int32)
    )
    settings = {"requests": shape.get("requests", 1), "eviction": "lru"}
    return Trace(settings, np.array(rows, np.int32), np.array(padded, np.int32), (group,))


@st.composite
def shapes(draw):
    select = draw(st.integers(1, 5))
    return {
        "select": select,
        "slots": select + draw(st.integers(0, 6)),
        "unit": draw(st.sampled_from([1, 2])),
        "ring": draw(st.integers(2, 4)),
        "lane_heads": draw(st.integers(1, 2)),
        "requests": 2,
        "units": 24,
        "layers": 2,
    }


@examples(CPU, cpu=30, interpret=1, gpu=1)
@given(st.data(), shapes())
def test_counts_and_orders_are_those_of_the_plan(data, shape):
    """Requests grow token by token, restored now and then: resident, outgrown, never resident."""
    make = partial(registry().create, "transfer", "zero_copy")
    dtype = torch.float32
    bench = TransferBench(
        make, group_shape(**shape, dim=4, dtype=dtype), torch.device("cpu"), "reference"
    )
    unit, lanes, most = shape["unit"], shape["lane_heads"], 24 * shape["unit"]
    state = [{"length": 0, "high": 0, "resident": data.draw(st.booleans())} for _ in range(2)]
    rows, events, ids, limits, counts, snapshots = [], [], [], [], [], []
    for number in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 5)) == 0:
            slot = data.draw(st.integers(0, 1))
            length, resident = data.draw(st.integers(0, most - 1)), data.draw(st.booleans())
            bench.engine.restore(slot, length, resident)
            state[slot] = {"length": length, "high": length, "resident": resident}
            events += [(KIND.RESET, slot), (KIND.WRITE, slot, 0, length, length, int(resident))]
        growing = [slot for slot in (0, 1) if state[slot]["length"] < most]
        batch = data.draw(st.permutations(growing))
        if not batch:
            break
        for slot in batch:
            state[slot]["length"] += 1
            state[slot]["high"] = max(state[slot]["high"], state[slot]["length"])
        live = [Row(slot, appended=True, **state[slot]) for slot in batch]
        bench.put(live)
        events.append((KIND.PLAN, number))
        chosen = []
        for layer in range(shape["layers"]):
            limit = max((row.length - 1) // unit for row in live)
            wanted = strategies.adversarial_ids(max(1, limit), shape["select"])
            picks = [data.draw(wanted) for _ in range(len(batch) * lanes)]
            before = bench.store.counters[layer].clone()
            bench.run(layer, picks)
            after = bench.store.counters[layer] - before
            chosen.append((picks, after.view(2, lanes, 2)[batch].numpy()))
        for place, row in enumerate(live):
            own = slice(place * lanes, (place + 1) * lanes)
            ids.append([picks[own] for picks, _ in chosen])
            counts.append([after[place] for _, after in chosen])
            limits.append(max(0, (row.length - 1) // unit))
            rows.append((number, row.slot, row.length, row.high, 1, int(row.resident), 0))
            events.append(
                (KIND.CLOSE, row.slot, row.length - 1, row.length, row.high, int(row.resident))
            )
        bench.engine.offload()
        held = bench.store.slot_unit.gather(-1, bench.store.order.long())
        snapshots.append((len(events), held.unflatten(1, (2, lanes)).numpy()))
    if not rows:
        return
    trace = trace_of(shape, shape["select"], rows, events, ids, limits)
    wanted = Wanted.of(trace, trace.groups[0])
    found = Lanes(trace, wanted, shape["slots"], LeastRecentlyUsed()).run()
    expected = np.array(counts)  # [R, L, H, 2]
    assert np.array_equal(found.hits, expected[..., 0])
    assert np.array_equal(found.misses, expected[..., 1])
    for count, held in snapshots:
        before = evolve(trace, events=trace.events[:count])
        replayed = Lanes(before, wanted, shape["slots"], LeastRecentlyUsed())
        replayed.run()
        mine = np.where(replayed.held == wanted.free, -1, replayed.held)  # [S, L * H, C]
        for slot in range(len(mine)):
            assert np.array_equal(mine[slot].reshape(held[:, slot].shape), held[:, slot])


def drive(script, **options):
    """Decode by a script, recorded; the ids depend on the script alone."""
    coordinator = make_coordinator(CPU, algorithm="scripted", budget=8, **options)
    generator = torch.Generator().manual_seed(script["seed"])

    def forward(rows, **what):
        coordinator.forward_begin(**what)
        for layer in range(LAYERS):
            given = [
                torch.randn(rows, heads, DIM, generator=generator)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            coordinator.attention(layer, *given)
        coordinator.forward_end()

    def choose():
        for path in coordinator.layers:
            if path.algorithm:  # one row, for all lanes: prompts are warmed one by one at times
                shape = (1, path.view.group.select)
                ids = torch.randint(-1, 14, shape, generator=generator, dtype=torch.int32)
                path.algorithm.next_ids[path.view.layer] = ids

    with recording(coordinator) as recorder:
        slots = [coordinator.request_begin() for _ in range(2)]
        for slot in slots:
            forward(PROMPT, prefill=[(slot, PROMPT)])
        for call in script["calls"]:
            if call == "fork":
                coordinator.request_end(slots.pop())
                slots.append(coordinator.fork(slots[0]))
            elif call == "truncate":
                coordinator.truncate(slots[0], coordinator.length(slots[0]) - 3)
            elif call == "rollback":
                coordinator.rollback(slots[0], coordinator.length(slots[0]) - 1)
            else:
                choose()
                forward(2, decode=slots)
    coordinator.close()
    return recorder.trace()


@examples(CPU, cpu=12, interpret=1, gpu=1)
@given(
    seed=st.integers(0, 99),
    calls=st.lists(
        st.sampled_from(["step"] * 6 + ["fork", "truncate", "rollback"]), min_size=4, max_size=20
    ),
    buffers=st.lists(st.sampled_from([8, 10, 14, 18, 24]), min_size=2, max_size=2),
    fast=st.booleans(),
)
def test_a_trace_of_one_buffer_replays_as_a_coordinator_of_another(seed, calls, buffers, fast):
    script = {"seed": seed, "calls": calls}
    one, other = (drive(script, buffer=each, resident_fast_path=fast) for each in buffers)
    assert np.array_equal(one.groups[0].ids, other.groups[0].ids)
    replayed = Replayer(one).run([other.groups[0].geometry.buffer_slots], LRU)[0]
    assert np.array_equal(replayed.hits, other.groups[0].counts[..., 0])
    assert np.array_equal(replayed.misses, other.groups[0].counts[..., 1])


@st.composite
def tiny(draw):
    """One lane that holds some of its units from the start and then outgrows its buffer."""
    slots, width = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    universe = range(5)
    sets = st.lists(st.sampled_from(universe), min_size=width, max_size=width, unique=True)
    return slots, width, draw(st.integers(0, slots)), draw(st.lists(sets, min_size=1, max_size=7))


def tiny_trace(width, filled, picks):
    shape = {"select": width, "unit": 1, "ring": 2, "lane_heads": 1, "layers": 1, "units": 24}
    events = [(KIND.WRITE, 0, 0, filled, filled, 1)]
    events += [(KIND.PLAN, number) for number in range(len(picks))]
    rows = [(number, 0, 24, 24, 0, 1, 0) for number in range(len(picks))]
    return trace_of(shape, width, rows, events, picks, [23] * len(picks))


def least_misses(picks, held, slots):
    """Return the fewest misses, by trying every way to evict."""
    if not picks:
        return 0
    wanted, rest = set(picks[0]), picks[1:]
    missing = wanted - held
    room = slots - len(wanted)
    others = sorted(held - wanted)
    keep = min(room, len(others))
    return len(missing) + min(
        least_misses(rest, wanted | set(kept), slots) for kept in combinations(others, keep)
    )


@examples(CPU, cpu=150, interpret=1, gpu=1)
@given(tiny())
def test_belady_is_the_best_there_is(case):
    slots, width, filled, picks = case
    replayer = Replayer(tiny_trace(width, filled, picks))
    best, lru = (int(replayer.run([slots], policy)[0].misses.sum()) for policy in (BELADY, LRU))
    assert best == least_misses(picks, set(range(filled)), slots)
    assert lru >= best


@examples(CPU, cpu=30, interpret=1, gpu=1)
@given(tiny())
def test_the_formula_of_an_installed_policy_is_the_plans(case):
    """The core's own LRU, by its hook, is that of the simulator."""
    slots, width, filled, picks = case
    trace = tiny_trace(width, filled, picks)
    wanted = Wanted.of(trace, trace.groups[0])
    one, other = (
        Lanes(trace, wanted, slots, policy) for policy in (Installed("lru"), LeastRecentlyUsed())
    )
    assert np.array_equal(one.run().misses, other.run().misses)
    assert np.array_equal(one.held, other.held)


def test_belady_can_be_run_again():
    """Its knowledge of the future begins anew with each buffer."""
    picks = [[unit] for unit in (0, 1, 2, 0, 1, 3, 0, 3, 1, 2)]
    again = Replayer(tiny_trace(1, 0, picks))
    first = again.run([2], BELADY)[0].misses.sum()
    again.run([3], BELADY)
    assert again.run([2], BELADY)[0].misses.sum() == first == least_misses(picks, set(), 2)


def test_a_buffer_that_holds_no_selection_is_refused():
    trace = tiny_trace(2, 0, [[0, 1]])
    with pytest.raises(TraceError, match="take 2 tokens"):
        Replayer(trace).run([1], LRU)
