"""Triton kernels that move single tokens between packed keys and values and their entries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    p_k,
    p_v,
    p_target,
    p_page_table,
    p_step_slots,
    p_lengths,
    p_appended,
    s_k,
    s_k_token,
    s_k_head,
    s_v,
    s_v_token,
    s_v_head,
    s_page,
    s_head,
    s_unit,
    max_pages,
    RING: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Append new tokens to the ring (RING) or their pages. Grid (B, Hkv, Q). Strides in
    elements."""
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    nth = tl.program_id(2).to(tl.int64)
    slot = tl.load(p_step_slots + batch).to(tl.int64)
    appended = tl.load(p_appended + batch)
    if (slot >= 0) & (nth < appended):
        position = tl.load(p_lengths + batch).to(tl.int64) - appended + nth
        unit = position // UNIT
        lane_head = kv_head // HEADS_PER_LANE
        if RING:
            lane_row = slot * LANE_HEADS + lane_head
            entry = (lane_row * (C + T) + C + unit % T) * (HEADS_PER_LANE * PLANES * UNIT * D)
        else:
            page = tl.load(p_page_table + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
            entry = page * s_page + lane_head * s_head + (unit % UNITS_PER_PAGE) * s_unit
        entry += (kv_head % HEADS_PER_LANE) * (PLANES * UNIT * D) + (position % UNIT) * D
        d = tl.arange(0, BLOCK_D)
        k = tl.load(p_k + batch * s_k + nth * s_k_token + kv_head * s_k_head + d, d < D)
        tl.store(p_target + entry + d, k, d < D)
        if PLANES == 2:
            v = tl.load(p_v + batch * s_v + nth * s_v_token + kv_head * s_v_head + d, d < D)
            tl.store(p_target + entry + UNIT * D + d, v, d < D)


@triton.jit
def _store_planes(p_entry, d, k, v, mask, plane, PLANES: tl.constexpr):
    """Write rows to their entries: keys, and values a ``plane`` further on if there are two."""
    tl.store(p_entry[:, None] + d[None, :], k, mask)
    if PLANES == 2:
        tl.store((p_entry + plane)[:, None] + d[None, :], v, mask)


@triton.jit(
    do_not_specialize=["first_lane_row", "start", "tokens", "low", "claim_below"],
    do_not_specialize_on_alignment=["p_page_row"],
)
def store_kernel(
    p_k,
    p_v,
    p_pool,
    p_buffer,
    p_page_row,
    p_unit_slot,
    p_slot_unit,
    first_lane_row,
    start,
    tokens,
    low,
    claim_below,
    s_k,
    s_v,
    s_page,
    s_head,
    s_unit,
    max_units,
    WRITE: tl.constexpr,
    SPARSE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a prefill chunk in its pages, the ring and LRU slots. Grid (programs).

    The programs share the blocks of tokens of all heads, see ``fetch_kernel``. Units below
    ``claim_below`` take the LRU slot of their own number. Strides of host memory in its elements.
    """
    SIZE: tl.constexpr = HEADS_PER_LANE * PLANES * UNIT * D
    d = tl.arange(0, BLOCK_D)
    tile, step = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(tokens, BLOCK_T) * KV_HEADS
    for _ in range(tl.program_id(0), tiles, step):
        kv_head = (tile % KV_HEADS).to(tl.int64)
        i = (tile // KV_HEADS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = i < tokens
        position = start + i
        unit = position // UNIT
        both = live[:, None] & (d < D)[None, :]
        k = tl.load(p_k + (i * s_k + kv_head * D)[:, None] + d[None, :], both, other=0.0)
        v = k
        if PLANES == 2:
            v = tl.load(p_v + (i * s_v + kv_head * D)[:, None] + d[None, :], both, other=0.0)
        at = (kv_head % HEADS_PER_LANE) * (PLANES * UNIT * D) + (position % UNIT) * D

        lane_head = kv_head // HEADS_PER_LANE
        page = tl.load(p_page_row + unit // UNITS_PER_PAGE, live, other=0).to(tl.int64)
        p_entry = p_pool + page * s_page + lane_head * s_head + (unit % UNITS_PER_PAGE) * s_unit
        WRITE(p_entry, at, d, k, live, both, SIZE, D)
        if PLANES == 2:
            WRITE(p_entry, at + UNIT * D, d, v, live, both, SIZE, D)
        if SPARSE:
            lane_row = first_lane_row + lane_head
            p_lane = p_buffer + lane_row * (C + T) * SIZE
            in_ring = both & (unit >= low)[:, None]
            entry = (C + unit % T) * SIZE + at
            _store_planes(p_lane + entry, d, k, v, in_ring, UNIT * D, PLANES)

            claims = live & (unit < claim_below)
            p_mapped = p_unit_slot + lane_row * max_units + unit
            mapped = tl.load(p_mapped, live, other=-1).to(tl.int64)
            place = tl.where(claims, unit, mapped)
            tl.store(p_mapped, unit.to(tl.int32), claims)
            tl.store(p_slot_unit + lane_row * C + unit, unit.to(tl.int32), claims)
            in_lru = both & (place >= 0)[:, None]
            entry = place * SIZE + at
            _store_planes(p_lane + entry, d, k, v, in_lru, UNIT * D, PLANES)
        tile += step


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_page_row"])
def fetch_kernel(
    p_k,
    p_v,
    p_pool,
    p_page_row,
    start,
    tokens,
    s_page,
    s_head,
    s_unit,
    READ: tl.constexpr,
    DECODE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy history from its pages to packed ``[tokens, Hkv, D]``. Grid (programs).

    The programs share the blocks of tokens of all heads, so that few of them can do it beside
    other kernels. Strides of host memory in its elements.
    """
    SIZE: tl.constexpr = HEADS_PER_LANE * PLANES * UNIT * D
    DTYPE: tl.constexpr = p_k.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    tile, step = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(tokens, BLOCK_T) * KV_HEADS
    for _ in range(tl.program_id(0), tiles, step):
        kv_head = (tile % KV_HEADS).to(tl.int64)
        i = (tile // KV_HEADS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = i < tokens
        position = start + i
        unit = position // UNIT
        both = live[:, None] & (d < D)[None, :]
        page = tl.load(p_page_row + unit // UNITS_PER_PAGE, live, other=0).to(tl.int64)
        p_entry = p_pool + page * s_page + (kv_head // HEADS_PER_LANE) * s_head
        p_entry += (unit % UNITS_PER_PAGE) * s_unit
        at = (kv_head % HEADS_PER_LANE) * (PLANES * UNIT * D) + (position % UNIT) * D
        packed = ((i * KV_HEADS + kv_head) * D)[:, None] + d[None, :]
        k = READ(p_entry, at, d, live, both, SIZE, D)
        if PLANES == 2:  # both are on their way before one is waited for
            v = READ(p_entry, at + UNIT * D, d, live, both, SIZE, D)
            tl.store(p_v + packed, DECODE(v, at, d, DTYPE, D), both)
        tl.store(p_k + packed, DECODE(k, at, d, DTYPE, D), both)
        tile += step
