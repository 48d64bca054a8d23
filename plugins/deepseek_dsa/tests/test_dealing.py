"""Division of a step's tiles among programs: each goes to one, and none gets too many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_deepseek_dsa import dealing
from topkv_deepseek_dsa.launch import programs_of, rate_of, waves_of

TILE, SELECT = 64, 100
CUDA = torch.cuda.is_available()


@triton.jit
def dealt_kernel(
    p_slots,
    p_lengths,
    p_appended,
    p_out,
    rows,
    running,
    waves,
    rate,
    select,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    CUDA: tl.constexpr,
):
    row, block, tiles = dealing.dealt(
        *(p_slots, p_lengths, p_appended, rows, running, waves, rate, select),
        *(TILE, ROWS, QUERIES, CUDA),
    )
    at = p_out + 3 * tl.program_id(0)
    tl.store(at, row)
    tl.store(at + 1, block)
    tl.store(at + 2, tiles)


def tiles_of(length: int, slot: int) -> int:
    return -(-length // TILE) if slot >= 0 and length > SELECT else 0


def check(
    capacity: int, running: int, lengths: list[int], slots: list[int], queries: int = 1
) -> float:
    """Blocks of rows of up to ``capacity`` tiles, for all programs. Rows of several ``queries``
    have 1 to as many tokens more, which nobody scores.

    Returns:
        Tiles of the largest one over what each of the programs would have of all.
    """
    rows, device = len(lengths), "cuda" if CUDA else "cpu"
    programs = programs_of(rows, capacity, running)
    ints = {"dtype": torch.int32, "device": device}
    out = torch.full((programs, 3), -7, **ints)
    # The first row appends nothing, and has one query all the same.
    appended = [row % (queries + 1) for row in range(rows)]
    new = [0 if queries == 1 else max(each, 1) for each in appended]
    every = [[length + more for length, more in zip(lengths, new, strict=True)], appended]
    dealt_kernel[(programs,)](
        *(torch.tensor(slots, **ints), *torch.tensor(every, **ints), out, rows, running),
        *(waves_of(rows, running), rate_of(running), SELECT),
        TILE=TILE,
        ROWS=triton.next_power_of_2(rows),
        QUERIES=queries,
        CUDA=CUDA,
    )
    wanted = [tiles_of(*each) for each in zip(lengths, slots, strict=True)]
    every, scored, working, largest = sum(wanted), [0] * rows, 0, 0
    rate = np.float32(rate_of(running))
    waves = max(int(np.float32(every) * rate) + 1, waves_of(rows, running))
    shared = min(running * waves, programs)
    most = -(-every // (shared - rows)) if shared > rows else max(wanted)
    for row, block, tiles in out.tolist():
        if row >= rows:
            continue
        start, end = block * tiles, min((block + 1) * tiles, wanted[row])
        if start >= end:  # Rounded up, blocks may leave none for the last.
            continue
        assert start == scored[row]
        scored[row] = end
        working, largest = working + 1, max(largest, tiles)
    assert scored == wanted
    assert working <= shared
    assert largest <= most
    return largest * shared / max(every, 1)


def rows_of(data, count: int, capacity: int) -> tuple[list[int], list[int]]:
    """Lengths, some of them alike, some short and some nearly full; and slots."""
    tokens = capacity * TILE
    length = st.one_of(
        *(st.integers(0, tokens), st.integers(0, min(tokens, 3 * TILE))),
        *(st.integers(max(tokens - 3, 0), tokens), st.sampled_from([0, SELECT, SELECT + 1])),
    )
    lengths = [
        min(each, tokens) for each in data.draw(st.lists(length, min_size=1, max_size=count))
    ]
    slot = st.sampled_from([0, 0, 0, 0, -1])
    return lengths, [data.draw(slot) for _ in lengths]


def test_every_tile_is_dealt_once():
    @settings(deadline=None, max_examples=60)
    @given(st.data(), st.integers(1, 40), st.integers(1, 9))
    def inner(data, capacity, running):
        queries = data.draw(st.integers(1, 4))
        check(capacity, running, *rows_of(data, 7, capacity), queries)

    inner()


@pytest.mark.parametrize("count", [1, 3, 16, 40])
@pytest.mark.parametrize("share", [1, 43, 44, 800])
def test_rows_that_are_alike(count, share):
    """``share`` tiles a program and row: around the number that another wave of programs begins
    with, and more than there are waves for."""
    running = 4
    check(share * running, running, [share * running * TILE] * count, [0] * count)


def test_rows_far_below_their_capacity():
    """Such rows have as many programs as their tiles are for, not as the capacity is."""
    for tiles in (5, 40):
        check(2000, 16, [40 * TILE, tiles * TILE], [0, 0])


def test_many_rows_are_divided():
    """Rows are not left in two halves, say, where there is a program and a half for each."""
    for rows, running in ((33, 66), (22, 44), (20, 16)):
        lengths = [86 * TILE] * (rows - 1) + [87 * TILE]
        assert check(87, running, lengths, [0] * rows) < 1.25


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_every_tile_of_long_rows_is_dealt_once():
    """Rows have up to 2^20 tokens, where shares are rounded."""

    @settings(deadline=None, max_examples=150)
    @given(st.data(), st.sampled_from([128, 512, 2048, 16384]), st.sampled_from([264, 396, 792]))
    def inner(data, capacity, running):
        check(capacity, running, *rows_of(data, 64, capacity))

    inner()
