"""A drifting selection is what it says: how much changes, and that the rest stays as it was."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_bench import drift_kernels
from topkv_bench.drift import SCALE, effective, rate_of, write

WRITERS = {"reference": write, "triton": drift_kernels.write}


@pytest.fixture(params=WRITERS)
def writer(request):
    return WRITERS[request.param]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def selection(writer, length, *, heads=2, select=5, units=40, rate=9830, layer=3, slot=1):
    ids = torch.zeros((heads, select), dtype=torch.int32)
    writer(ids, ints(slot), ints(length), ints(units), layer, units, rate)
    return ids


def changed(before, after):
    """Count the units of each lane that were not there before."""
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    return [len(set(new) - set(old)) for old, new in pairs]


sizes = {
    "select": st.integers(1, 300),
    "spare": st.integers(0, 4000),
    "drift": st.floats(0, 1),
    "length": st.integers(1, 2**20),
    "layer": st.integers(0, 200),
}


@given(**sizes)
def test_every_step_replaces_the_share_that_is_stated(select, spare, drift, length, layer):
    """Phases are those of the golden ratio, so that single steps hardly differ."""
    units, rate = select + spare, rate_of(drift)
    named = {"select": select, "units": units, "rate": rate, "layer": layer}
    steps = [selection(write, length + step, **named) for step in range(9)]
    expected = effective(drift, select, units)
    # A share of the columns has a phase in an arc as long as the rate; columns of one unit stay.
    error = 3 + math.log2(select)
    movable = min(select, spare)
    for before, after in pairwise(steps):
        for count in changed(before, after):
            assert abs(count - expected * select) <= error + min(movable, select - movable)
            assert count <= movable
            if movable == select:
                assert abs(count - expected * select) <= error


def test_over_many_steps_the_share_is_exact():
    """After SCALE / gcd steps every column has moved as often as the rate says."""
    select, units, drift = 16, 16 * 50, 0.125
    ids = [
        selection(write, step, select=select, units=units, rate=rate_of(drift))
        for step in range(1, 82)
    ]
    moved = sum(sum(changed(*pair)) for pair in pairwise(ids))
    assert moved == 80 * drift * select * 2
    assert effective(drift, select, units) == drift


@given(**sizes)
def test_units_are_distinct_and_selectable(select, spare, drift, length, layer):
    units = select + spare
    ids = selection(write, length, select=select, units=units, rate=rate_of(drift), layer=layer)
    assert all(len(set(lane)) == select for lane in ids.tolist())
    assert 0 <= ids.min() <= ids.max() < units


def test_a_unit_comes_back_only_after_all_others_of_its_column(writer):
    seen = [selection(writer, length, rate=SCALE)[0, 0].item() for length in range(1, 9)]
    assert len(set(seen)) == 8  # 40 units in 5 columns
    assert selection(writer, 9, rate=SCALE)[0, 0].item() == seen[0]


def test_no_drift_is_one_selection(writer):
    first = selection(writer, 7, rate=0)
    assert torch.equal(first, selection(writer, 900_000, rate=0))


def test_lanes_layers_and_slots_walk_differently(writer):
    ids = selection(writer, 7, select=50, units=4000)
    assert not torch.equal(ids[0], ids[1])
    for other in ({"layer": 4}, {"slot": 2}):
        assert not torch.equal(ids, selection(writer, 7, select=50, units=4000, **other))


def test_what_was_not_selected_is_not_selected_now(writer):
    """-1 stays, padded rows and rows that are too short stay, columns beside stay."""
    held = torch.full((8, 7), -5, dtype=torch.int32)
    ids = held[:, :5]
    ids.copy_(torch.arange(5, dtype=torch.int32))
    ids[0, 2] = ids[1, 4] = -1
    ids[2:4] = -1
    slots, lengths, limit = ints(3, -1, 0, 2), ints(641, 0, 321, 642), ints(40, 0, 39, 41)
    writer(ids, slots, lengths, limit, 0, 40, rate_of(0.5))
    assert ids[0, 2] == ids[1, 4] == -1
    assert (ids[2:4] == -1).all()
    assert torch.equal(ids[4:6], torch.arange(5, dtype=torch.int32).expand(2, 5))
    assert (ids[[0, 0, 1, 1, 6, 7], [1, 3, 0, 3, 4, 4]] >= 8 * ints(1, 3, 0, 3, 4, 4)).all()
    assert (held[:, 5:] == -5).all()


def test_selections_that_hold_everything_stay(writer):
    ids = torch.arange(5, dtype=torch.int32).flip(0)[None].contiguous()
    writer(ids, ints(0), ints(64), ints(4), 0, 4, SCALE)
    assert torch.equal(ids, torch.arange(5, dtype=torch.int32).flip(0)[None])
    assert effective(1.0, 5, 4) == 0
    assert effective(1.0, 5, 5) == 0
    assert effective(1.0, 5, 7) == 0.4
    assert effective(1.0, 5, 10) == 1


@given(
    select=st.integers(1, 300),
    spare=st.integers(0, 9000),
    rate=st.integers(0, SCALE),
    lengths=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    layer=st.integers(0, 200),
)
def test_the_kernel_writes_the_same(select, spare, rate, lengths, heads, layer):
    rows, units = len(lengths), select + spare
    ids = torch.arange(select, dtype=torch.int32).repeat(rows * heads, 1) - 1
    slots, limit = ints(*range(rows - 1, -1, -1)), ints(*(units for _ in lengths))
    both = [ids.clone(), ids.clone()]
    for each, over in zip(both, WRITERS.values(), strict=True):
        over(each, slots, ints(*lengths), limit, layer, units, rate)
    assert torch.equal(*both)
