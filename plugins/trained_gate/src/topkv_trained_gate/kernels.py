"""The block index in Triton, beside ``reference``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_keys(p_key, tensors, at, slot, head, valid, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Index keys to their rows of the pool, as they are."""
    d = tl.arange(0, OPTIONS[0])[None, :]
    inside = valid[:, None] & (d < D)
    tl.store(tensors[0] + at[:, None] * D + d, tl.load(p_key[:, None] + d, inside), inside)


@triton.jit
def _best(
    p_index,
    p_pages,
    query,
    unit,
    end,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """fp32 ``[M]``: the best product of each query ``[BLOCK_D, M]`` with a token of a unit."""
    d = tl.arange(0, BLOCK_D)[None, :]
    best = tl.full([query.shape[1]], float("-inf"), tl.float32)
    for first in range(0, UNIT, TILE):
        within = first + tl.arange(0, TILE)
        token = unit * UNIT + within
        valid = (within < UNIT) & (unit < end)
        page = tl.load(p_pages + token // PAGE, valid, other=0).to(tl.int64)
        at = (page * PAGE + token % PAGE)[:, None] * DIM
        keys = tl.load(p_index + at + d, valid[:, None] & (d < DIM), other=0.0)
        if EXACT:
            products = tl.dot(keys.to(tl.float32), query, input_precision="ieee")
        else:
            products = tl.dot(keys, query)
        best = tl.maximum(best, tl.max(tl.where(valid[:, None], products, float("-inf")), 0))
    return best


@triton.jit(
    do_not_specialize=["rows", "start", "slot", "s_score"],
    do_not_specialize_on_alignment=["p_q", "p_scores"],
)
def score_kernel(
    p_q,
    p_index,
    p_pages,
    p_slots,
    p_lengths,
    p_appended,
    p_scores,
    p_ends,
    rows,
    start,
    slot,
    s_pages,
    s_row,
    s_head,
    s_score,
    PROMPT: tl.constexpr,
    QUERIES: tl.constexpr,
    HELD: tl.constexpr,
    LOCAL: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (ROWS rows, UNITS units): scores of units, and how many of them count.

    In a step a row has a request of its own, ROWS is 1, and closed units count. Of QUERIES of a
    row, of which HELD are multiplied, the best counts. The rows of a prompt are one request's,
    from position ``start``, and the unit that each is in counts too. The last LOCAL ones score
    ``+inf``.
    """
    m = tl.arange(0, ROWS * BLOCK_H)
    row, head = tl.program_id(0) * ROWS + m // BLOCK_H, m % BLOCK_H
    inside = (row < rows) & (head < HEADS)
    if PROMPT:
        ends = (start + row) // UNIT + 1
        most = (start + tl.minimum((tl.program_id(0) + 1) * ROWS, rows) - 1) // UNIT + 1
        pages = p_pages + slot.to(tl.int64) * s_pages
    else:
        own = tl.load(p_slots + tl.program_id(0)).to(tl.int64)
        new = 1
        if QUERIES > 1:
            new = tl.maximum(tl.load(p_appended + tl.program_id(0)), 1)
        closed = tl.maximum(tl.load(p_lengths + tl.program_id(0)) - new, 0) // UNIT
        most = tl.where(own >= 0, closed, 0)
        ends = tl.zeros_like(row) + most
        pages = p_pages + tl.maximum(own, 0) * s_pages
    lane = row.to(tl.int64) * HEADS + head
    if tl.program_id(1) == 0:
        tl.store(p_ends + lane, ends, inside)
    d = tl.arange(0, BLOCK_D)[:, None]
    p_row, in_q = p_q + row.to(tl.int64) * s_row + head * s_head, inside
    if QUERIES > 1:  # those that are padding are copies of the last one
        m = tl.arange(0, HELD * BLOCK_H)
        asked = tl.program_id(0).to(tl.int64) * QUERIES + tl.minimum(m // BLOCK_H, new - 1)
        p_row, in_q = p_q + asked * s_row + m % BLOCK_H * s_head, m % BLOCK_H < HEADS
    query = tl.load(p_row[None, :] + d, in_q[None, :] & (d < DIM), other=0.0)
    if EXACT:
        query = query.to(tl.float32)
    first = tl.program_id(1) * UNITS
    for unit in range(first, tl.minimum(first + UNITS, most)):
        best = _best(
            *(p_index, pages, query, unit, most),
            *(UNIT, PAGE, DIM, BLOCK_D, TILE, EXACT),
        )
        if QUERIES > 1:
            best = tl.max(tl.reshape(best, [HELD, BLOCK_H]), 0)
        score = tl.where(unit >= ends - LOCAL, float("inf"), best)
        tl.store(p_scores + lane * s_score + unit, score, inside)
