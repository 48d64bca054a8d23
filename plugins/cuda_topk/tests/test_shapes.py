"""Division and sampling of rows: any size finds room, and the room is enough."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_cuda_topk import reference
from topkv_cuda_topk.shapes import (
    DRAWN,
    MAX_COLUMNS,
    MAX_ROOM,
    need,
    ranks,
    sampling,
    shape_of,
)

SHARED_BYTES = 227 * 1024
"""Shared memory that a block can have on an H200."""

columns = st.one_of(st.integers(1, MAX_COLUMNS), st.sampled_from([1, 2048, 8192, 32768, 131072]))
selects = st.one_of(st.integers(1, 4096), st.sampled_from([1, 127, 2048]))


@given(st.integers(1, 4096), columns, selects, st.integers(1, 200))
def test_any_row_fits_its_blocks(rows, width, select, multiprocessors):
    shape = shape_of(rows, width, select, multiprocessors)
    assert shape.columns >= width
    assert shape.cluster in (1, 2, 4, 8)
    assert shape.threads in (512, 1024)
    assert shape.items in range(4, 37, 4)
    assert shape.room % shape.threads == shape.samples % shape.threads == 0
    # What `struct Shared` holds: scores or merged candidates, the list with its indices, and less
    # than 4 KiB beside them.
    part = shape.threads * shape.items
    assert 4 * max(part, shape.room) + 6 * shape.room + 4096 <= SHARED_BYTES


@given(st.integers(1, 4096), columns, selects, st.integers(1, 200))
def test_a_row_gets_more_blocks_only_while_there_are_multiprocessors(
    rows, width, select, multiprocessors
):
    shape = shape_of(rows, width, select, multiprocessors)
    half = shape_of(multiprocessors + 1, width, select, multiprocessors).cluster
    assert shape.cluster == half or shape.cluster * rows <= multiprocessors


@given(columns, selects, st.sampled_from([512, 1024]))
def test_candidates_have_room(width, select, threads):
    samples, room = sampling(width, select, threads)
    assert room >= min(width, max(select, need(samples, width, select)))
    assert samples // threads in DRAWN
    assert room <= MAX_ROOM


@given(columns, selects, st.integers(1, MAX_COLUMNS), st.integers(1, 4096))
def test_smaller_calls_need_no_more_room(width, select, fewer, smaller):
    """Than those that the kernel was made for, but for ranks being whole."""
    samples, _ = sampling(width, select, 512)
    asked = need(samples, min(fewer, width), min(smaller, select))
    assert asked <= need(samples, width, select) + 3 * width / samples + 1


@given(st.integers(1, MAX_COLUMNS), st.sampled_from([512, 1024, 2048, 4096]))
def test_there_is_a_sample_in_every_part_of_the_row(columns, samples):
    places = reference.places(columns, samples)
    parts = places * samples // columns
    assert places.min() >= 0
    assert places.max() < columns
    # Rounded to whole scores, a place may stand at the end of the part before its own.
    late = torch.arange(samples) - parts
    assert late.min() >= 0
    assert late.max() <= max(1, -(-samples // columns))


@pytest.mark.parametrize("part", [1.0, 0.4])
def test_the_guess_is_good_for_nearly_all_rows(part):
    """Scores in random order, also of rows that end early: candidates are K or more, and no more
    than there is room for."""
    generator, missed, rows = torch.Generator().manual_seed(0), 0, 1500
    for width, select in ((32768, 2048), (131072, 2048), (131072, 127), (20000, 512)):
        samples, room = sampling(width, select, 512)
        length = int(part * width)
        at = reference.places(width, samples)
        real = int((at < length).sum())
        first, last = ranks(width, select, samples)
        assert last <= real
        for _ in range(rows):
            # Rank of the score at each place: places are distinct, so a permutation gives them.
            order = torch.randperm(length, generator=generator)[:real].sort().values
            above = [int(order[rank - 1]) for rank in (first, last)]
            missed += above[0] < select or above[1] > room
    # Either side of the guess fails some 1e-4 of the rows; 6000 were tried.
    assert missed <= 8


def test_places_are_distinct_in_long_rows():
    for width in (20000, 32768, 131072):
        samples, _ = sampling(width, 2048, 512)
        assert len(reference.places(width, samples).unique()) == samples
