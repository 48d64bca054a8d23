"""Conversions between topkv's contract and FlashMLA's, in Triton; see ``reference``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def seen(length, queries, nth):
    """Tokens that a query sees: all but those of the queries behind it; padding sees none."""
    return tl.where(nth < queries, length - (queries - 1 - nth), 0)


@triton.jit
def indices_kernel(
    p_table,
    p_lengths,
    p_indices,
    width,
    s_table,
    s_indices,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    p_queries=None,
):
    """Grid (lanes x QUERIES, blocks of columns): the row of each token that a query sees, -1
    behind them."""
    lane = (tl.program_id(0) // QUERIES).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(p_lengths + lane)
    if QUERIES > 1:
        length = seen(length, tl.load(p_queries + lane), tl.program_id(0) % QUERIES)
    used = column < length
    unit = tl.load(p_table + lane * s_table + column // UNIT, used, other=0)
    row = tl.where(used, unit * UNIT + column % UNIT, -1)
    p_row = p_indices + tl.program_id(0).to(tl.int64) * s_indices
    tl.store(p_row + column, row, column < width)


@triton.jit(do_not_specialize=["width", "room", "ahead"])
def shown_kernel(
    p_ids,
    p_indices,
    p_counts,
    width,
    room,
    ahead,
    s_ids,
    BLOCK: tl.constexpr,
):
    """Grid (rows of a prompt,): columns that a row has selected and may see, and how many; -1
    behind them. Row 0 sees the columns up to ``ahead``, and each further row one more."""
    row = tl.program_id(0).to(tl.int64)
    p_ids += row * s_ids
    p_indices += row * room
    count = 0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        found = tl.load(p_ids + column, column < width, other=-1)
        shown = (found >= 0) & (found <= ahead + row)
        place = count + tl.cumsum(shown.to(tl.int32), 0) - 1
        tl.store(p_indices + place, found, shown)
        count += tl.sum(shown.to(tl.int32), 0)
    for start in range(0, room, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(p_indices + column, -1, (column >= count) & (column < room))
    tl.store(p_counts + row, count)


@triton.jit
def shift_kernel(
    p_from,
    p_queries,
    p_to,
    heads,
    s_from_lane,
    s_from_query,
    s_from_head,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid (lanes x QUERIES, blocks of heads): move the queries of each lane behind its padding,
    which becomes 0."""
    lane = (tl.program_id(0) // QUERIES).to(tl.int64)
    nth = tl.program_id(0) % QUERIES - QUERIES + tl.load(p_queries + lane)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    cell = (head < heads)[:, None] & (d < DIM)
    p_row = p_from + lane * s_from_lane + nth.to(tl.int64) * s_from_query
    value = tl.load(p_row + head[:, None] * s_from_head + d, cell & (nth >= 0), other=0.0)
    p_row = p_to + (tl.program_id(0).to(tl.int64) * heads + head[:, None]) * DIM
    tl.store(p_row + d, value, cell)


@triton.jit
def finish_kernel(
    p_from,
    p_from_lse,
    p_lengths,
    p_out,
    p_lse,
    heads,
    s_from_lane,
    s_from_head,
    s_lse_lane,
    s_lse_head,
    s_out_lane,
    s_out_head,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    SHIFTED: tl.constexpr = False,
    p_queries=None,
    s_from_query=0,
    s_lse_query=0,
    s_out_query=0,
):
    """Grid (lanes x QUERIES, blocks of heads): drop padded heads; queries that see nothing get 0
    and -inf. SHIFTED: those of each lane stand behind its padding.

    Not launched early: the library's last kernel is, and some of its programs return without
    waiting for the one that writes what is read here.
    """
    lane = (tl.program_id(0) // QUERIES).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < heads
    d = tl.arange(0, DIM)[None, :]
    length = tl.load(p_lengths + lane)
    if QUERIES > 1:
        nth = tl.program_id(0) % QUERIES
        queries = tl.load(p_queries + lane)
        length = seen(length, queries, nth)
        p_out += nth.to(tl.int64) * s_out_query
        if SHIFTED:
            nth = tl.where(nth < queries, nth + QUERIES - queries, nth)
        p_from += nth.to(tl.int64) * s_from_query
        p_from_lse += nth.to(tl.int64) * s_lse_query
    full = length > 0
    p_row = p_from + lane * s_from_lane + head[:, None] * s_from_head
    value = tl.load(p_row + d, real[:, None], other=0.0)
    value = tl.where(full, value, 0.0).to(p_out.dtype.element_ty)
    tl.store(p_out + lane * s_out_lane + head[:, None] * s_out_head + d, value, real[:, None])
    lse = tl.load(p_from_lse + lane * s_lse_lane + head * s_lse_head, real, other=0.0)
    p_row = p_lse + tl.program_id(0).to(tl.int64) * heads
    tl.store(p_row + head, tl.where(full, lse, float("-inf")), real)
