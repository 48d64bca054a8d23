"""Conversions between topkv's contract and FlashMLA's, in Triton; see ``reference``."""

from __future__ import annotations

import triton
import triton.language as tl


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
):
    """Grid (lanes, blocks of columns): the row of each token, -1 behind the length."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(p_lengths + lane)
    used = column < length
    unit = tl.load(p_table + lane * s_table + column // UNIT, used, other=0)
    row = tl.where(used, unit * UNIT + column % UNIT, -1)
    tl.store(p_indices + lane * s_indices + column, row, column < width)


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
):
    """Grid (lanes, blocks of heads): drop the padding; empty lanes get 0 and -inf.

    Not launched early: the library's last kernel is, and some of its programs return without
    waiting for the one that writes what is read here.
    """
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < heads
    d = tl.arange(0, DIM)[None, :]
    full = tl.load(p_lengths + lane) > 0
    p_row = p_from + lane * s_from_lane + head[:, None] * s_from_head
    value = tl.load(p_row + d, real[:, None], other=0.0)
    value = tl.where(full, value, 0.0).to(p_out.dtype.element_ty)
    tl.store(p_out + lane * s_out_lane + head[:, None] * s_out_head + d, value, real[:, None])
    lse = tl.load(p_from_lse + lane * s_lse_lane + head * s_lse_head, real, other=0.0)
    tl.store(p_lse + lane * heads + head, tl.where(full, lse, float("-inf")), real)
