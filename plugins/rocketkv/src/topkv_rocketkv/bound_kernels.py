"""What RocketKV keeps of units, in Triton, beside ``reference.minmax``.

Names: ``p_`` pointers, ``s_`` strides in elements. Bounds are addressed by host page in 64 bit, as
``reference.by_page`` packs them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_unit(
    p_k,
    s_token,
    tokens,
    p_bounds,
    D: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Bounds of the first ``tokens`` keys at ``p_k``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    valid = (t < tokens) & in_d[None, :]
    keys = tl.load(p_k + t.to(tl.int64) * s_token + d[None, :], valid, other=0).to(tl.float32)
    low = tl.min(tl.where(valid, keys, float("inf")), 0) + 0.0
    high = tl.max(tl.where(valid, keys, float("-inf")), 0) + 0.0
    tl.store(p_bounds + d * UNITS_PER_PAGE, low, in_d)
    tl.store(p_bounds + (D + d) * UNITS_PER_PAGE, high, in_d)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_bounds,
    p_pages,
    first_unit,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (unit of the chunk, kv-head); ``p_pages`` is the page row of the request."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    unit = first_unit + nth
    page = tl.load(p_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * KV_HEADS + head) * (2 * D * UNITS_PER_PAGE) + unit % UNITS_PER_PAGE
    _write_unit(
        p_k + nth * UNIT * s_token + head * s_head,
        s_token,
        tl.minimum(tokens - nth * UNIT, UNIT),
        p_bounds + at,
        D,
        UNITS_PER_PAGE,
        BLOCK_T,
        BLOCK_D,
    )


@triton.jit
def update_kernel(
    p_ring,
    p_bounds,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    s_slot,
    s_lane,
    s_unit,
    s_head,
    s_token,
    HEADS_PER_LANE: tl.constexpr,
    T: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, kv-head): recompute the open unit from the ring."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    unit = newest // UNIT
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * KV_HEADS + head) * (2 * D * UNITS_PER_PAGE) + unit % UNITS_PER_PAGE
    p_ring += slot * s_slot + (head // HEADS_PER_LANE) * s_lane
    p_ring += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
    _write_unit(
        p_ring,
        s_token,
        newest % UNIT + 1,
        p_bounds + at,
        D,
        UNITS_PER_PAGE,
        BLOCK_T,
        BLOCK_D,
    )
