"""Division of a step's tiles of tokens among programs of the score kernel, in Triton.

Only the device knows how long the requests of a step are, so each program works out its part.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _uniform(x, CUDA: tl.constexpr):
    """Return x unchanged, so that the compiler knows that all threads of a warp hold one value.

    It does not know that of the result of a reduction, and would keep loop counters in a register
    of each thread.
    """
    if CUDA:
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return x


@triton.jit
def length_of(p_slots, p_lengths, p_appended, r, rows, QUERIES: tl.constexpr):
    """Selectable tokens of rows ``r``: of several queries those before all of them."""
    length = tl.load(p_lengths + r, r < rows, other=0)
    if QUERIES > 1:
        length -= tl.maximum(tl.load(p_appended + r, r < rows, other=1), 1)
    length = tl.maximum(length, 0)
    return tl.where(tl.load(p_slots + r, r < rows, other=-1) < 0, 0, length)


@triton.jit
def lengths_of(p_slots, p_lengths, p_appended, rows, ROWS: tl.constexpr, QUERIES: tl.constexpr):
    """All rows and how many tokens they can select."""
    r = tl.arange(0, ROWS)
    return r, length_of(p_slots, p_lengths, p_appended, r, rows, QUERIES)


@triton.jit
def _blocks(tiles, share):
    """Number of blocks of a row that gets one program, and ``share`` more for each tile."""
    return tl.minimum((tiles * share).to(tl.int32) + 1, tiles)


@triton.jit
def dealt(
    p_slots,
    p_lengths,
    p_appended,
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
    """Return the row and the tiles that this program scores, of all tiles of a step.

    The tiles go to ``waves`` times as many programs as run at a time, ``running``, or once more
    for every ``1 / rate`` tiles if that is more and the grid has as many programs. Every row gets
    one program, and its share of the other programs rounded down: these are never more than there
    are, as what fp32 rounds up comes to less than one program for 2^20 of them. The programs of a
    row have blocks of one size.

    Returns:
        The row, ``rows`` or more for programs that are left over; which block of it; its tiles.
    """
    _, length = lengths_of(p_slots, p_lengths, p_appended, rows, ROWS, QUERIES)
    tiles = tl.where(length > select, tl.cdiv(length, TILE), 0)
    every = tl.sum(tiles, 0)
    waves = tl.maximum((every * rate).to(tl.int32) + 1, waves)
    programs = tl.minimum(running * waves, tl.num_programs(0))
    share = (programs - rows) / tl.maximum(every, 1).to(tl.float32)
    ends = tl.cumsum(_blocks(tiles, share), 0)
    before = ends <= tl.program_id(0)
    row = _uniform(tl.sum(before.to(tl.int32), 0), CUDA)
    first = _uniform(tl.max(tl.where(before, ends, 0), 0), CUDA)
    length = tl.load(p_lengths + row, row < rows, other=QUERIES)
    if QUERIES > 1:
        length -= tl.maximum(tl.load(p_appended + row, row < rows, other=1), 1)
    mine = tl.cdiv(length, TILE)
    return row, tl.program_id(0) - first, _uniform(tl.cdiv(mine, _blocks(mine, share)), CUDA)
