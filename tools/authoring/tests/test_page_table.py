"""The page table once more, in the form of a library."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv.types import GroupShape, Tables
from topkv_authoring.page_table import Listing, adapt_page_table
from topkv_testing.backend.bench import SENTINEL
from topkv_testing.backend.plans import AdaptCase, StepInputs
from topkv_testing.kit import examples
from topkv_testing.strategies import Geometry


@st.composite
def cases(draw):
    geometry = Geometry(2, 1, 16, draw(st.sampled_from([1, 4])), 1, "kv_head", torch.float32)
    row = st.one_of(st.just((-1, 0)), st.tuples(st.integers(0, 7), st.integers(1, 60)))
    rows = tuple(draw(st.lists(row, min_size=1, max_size=4)))
    select = draw(st.integers(1, 9))
    lanes = len(rows) * geometry.lane_heads
    counts = tuple(draw(st.integers(0, select)) for _ in range(lanes))
    tail = draw(st.booleans()) or geometry.unit > 1
    return AdaptCase(geometry, rows, counts, select, select + 2, 2, tail=tail)


def shape_of(case):
    g = case.geometry
    return GroupShape(
        *((0,), g.unit, g.lane_heads, g.kv_heads // g.lane_heads, g.dim, g.dtype, 64),
        *(case.max_requests, 64, case.select, case.buffer, case.ring),
    )


def test_a_listing_is_the_table_and_what_stands_behind(on):
    @examples(on, cpu=100, interpret=30, gpu=30)
    @given(case=cases(), room=st.integers(0, 5), behind=st.sampled_from([-1, 0]))
    def check(case, room, behind):
        inputs = StepInputs.empty(shape_of(case), case.batch, on.device)
        case.fill(inputs)
        lanes, width = len(case.counts), case.select + case.tail

        def ints(columns):
            shape = (lanes, columns)
            return torch.full(shape, SENTINEL, dtype=torch.int32, device=on.device)

        table, lengths, wide = ints(width), ints(1)[:, 0], ints(width + room + 3)
        last = ints(1)[:, 0] if behind == 0 else None
        listing = Listing(wide[:, : width + room], behind, last)
        tables = Tables(table, lengths)
        adapt_page_table(inputs.view, inputs.plan, tables, on.impl, listing)
        assert tables.attached is None, "what is attached is the backend's"
        case.check(table, lengths)
        for mine, lane in zip(listing.ids.tolist(), case.lanes(), strict=True):
            slots = [slot for slot, _ in lane]
            assert mine == slots + [behind] * (width + room - len(slots))
        if last is not None:
            whole = (width - 1) * case.geometry.unit
            assert [whole + each for each in last.tolist()] == lengths.tolist()
        assert (wide[:, width + room :] == SENTINEL).all(), "wrote behind its row"

    check()


def test_a_list_without_room_is_refused():
    case = AdaptCase(
        Geometry(2, 1, 16, 1, 1, "kv_head", torch.float32), ((0, 5),), (2, 2), 3, 5, 2
    )
    inputs = StepInputs.empty(shape_of(case), 1, "cpu")
    case.fill(inputs)
    tables = Tables(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    for ids in (tables.table[:, :3], tables.table[:1]):
        with pytest.raises(ValueError, match="expected a listing of"):
            adapt_page_table(inputs.view, inputs.plan, tables, "reference", Listing(ids))
