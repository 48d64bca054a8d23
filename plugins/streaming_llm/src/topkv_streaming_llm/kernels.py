"""Kernel that selects for StreamingLLM, in Triton, beside ``reference.kept_units``."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
"""Most ids of one program."""


@triton.jit
def window_kernel(
    p_slots,
    p_lengths,
    p_appended,
    p_ids,
    s_ids,
    select,
    sinks,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (lane, block of columns): the units that a lane keeps, -1 behind them."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row)
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0) // UNIT
    closed = tl.where(slot < 0, 0, closed)
    dropped = tl.maximum(closed - select, 0)
    unit = tl.where(column < sinks, column, column + dropped)
    unit = tl.where(unit < closed, unit, -1)
    tl.store(p_ids + lane * s_ids + column, unit, column < select)
