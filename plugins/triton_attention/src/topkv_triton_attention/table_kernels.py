"""A plan becomes a page table. Reference: ``reference.adapt_page_table``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adapt_kernel(
    slots_ptr,
    count_ptr,
    step_slots_ptr,
    step_lengths_ptr,
    table_ptr,
    lengths_ptr,
    width,
    stride_slots,
    stride_table,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BUFFER: tl.constexpr,
    RING: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one lane."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(step_slots_ptr + lane // LANE_HEADS)
    length = tl.load(step_lengths_ptr + lane // LANE_HEADS)
    live = (request >= 0) & (length > 0)
    count = tl.where(live, tl.load(count_ptr + lane), 0)
    start = (request * LANE_HEADS + (lane % LANE_HEADS).to(tl.int32)) * (BUFFER + RING)
    used = column < count
    ids = tl.load(slots_ptr + lane * stride_slots + column, mask=used, other=0)
    ids = tl.where(used, start + ids, 0)
    tokens = count * UNIT
    if TAIL:
        newest = tl.maximum(length - 1, 0)
        ring = start + BUFFER + newest // UNIT % RING
        ids = tl.where((column == count) & live, ring, ids)
        tokens = tl.where(live, tokens + newest % UNIT + 1, 0)
    tl.store(table_ptr + lane * stride_table + column, ids, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(lengths_ptr + lane, tokens)
