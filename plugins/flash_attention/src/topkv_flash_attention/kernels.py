"""Kernel that follows the library's, in Triton; ``reference.finish`` has it in torch."""

from __future__ import annotations

import triton
import triton.language as tl


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
    s_from_lse_lane,
    s_from_lse_head,
    s_out_row,
    s_out_head,
    s_lse_row,
    s_lse_head,
    COPY: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    p_queries=None,
    s_from_query=0,
    s_from_lse_query=0,
    s_out_query=0,
    s_lse_query=0,
):
    """Grid (lanes x QUERIES, blocks of a lane's heads): move the LSE; queries that see nothing get
    0 and -inf.

    Results are read by lane and written by row, the heads of a row's ``LANES`` lanes in order. Of
    several queries, those of a row from its ``queries`` on are padding; the others see all tokens
    of a lane but those of the queries behind them.

    With ``COPY`` the outputs move too; else the library has written them to ``p_out`` itself.
    """
    lane = (tl.program_id(0) // QUERIES).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < heads
    row, row_head = lane // LANES, lane % LANES * heads + head
    length = tl.load(p_lengths + lane)
    if QUERIES > 1:
        nth = (tl.program_id(0) % QUERIES).to(tl.int64)
        queries = tl.load(p_queries + row)
        length = tl.where(nth < queries, length - (queries - 1 - nth), 0)
        p_from += nth * s_from_query
        p_from_lse += nth * s_from_lse_query
        p_out += nth * s_out_query
        p_lse += nth * s_lse_query
    lse = tl.load(p_from_lse + lane * s_from_lse_lane + head * s_from_lse_head, real, other=0.0)
    lse = tl.where(length > 0, lse, float("-inf"))
    tl.store(p_lse + row * s_lse_row + row_head * s_lse_head, lse, real)
    d = tl.arange(0, BLOCK_D)[None, :]
    cell = real[:, None] & (d < DIM)
    p_cell = p_out + row * s_out_row + row_head[:, None] * s_out_head + d
    if COPY:
        p_row = p_from + lane * s_from_lane + head[:, None] * s_from_head
        value = tl.load(p_row + d, cell & (length > 0), other=0.0)
        tl.store(p_cell, value, cell)
    else:
        nothing = tl.zeros([BLOCK_H, BLOCK_D], p_out.dtype.element_ty)
        tl.store(p_cell, nothing, cell & (length <= 0))
