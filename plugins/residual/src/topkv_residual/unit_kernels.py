"""What is kept of units, in Triton, beside ``reference.summary``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_unit(
    p_k,
    p_v,
    s_k,
    s_v,
    tokens,
    p_means,
    p_deviation,
    VARIANCE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Of the first ``tokens`` keys and values at ``p_k`` and ``p_v``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    valid = (t < tokens) & (d < D)[None, :]
    k = tl.load(p_k + t.to(tl.int64) * s_k + d[None, :], valid, other=0).to(tl.float32)
    v = tl.load(p_v + t.to(tl.int64) * s_v + d[None, :], valid, other=0).to(tl.float32)
    mean = tl.sum(k, 0) / tokens
    kept = p_means.dtype.element_ty
    tl.store(p_means + d, mean.to(kept), d < D)
    tl.store(p_means + D + d, (tl.sum(v, 0) / tokens).to(kept), d < D)
    if VARIANCE:
        apart = tl.where(valid, k - mean[None, :], 0.0)
        deviation = tl.sqrt(tl.sum(apart * apart, 0) / tokens)
        tl.store(p_deviation + d, deviation.to(kept), d < D)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_v,
    p_means,
    p_deviation,
    p_pages,
    first_unit,
    tokens,
    s_k_token,
    s_k_head,
    s_v_token,
    s_v_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    VARIANCE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (unit of the chunk, kv-head); ``p_pages`` is the request's row of pages."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    unit = first_unit + nth
    page = tl.load(p_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    _write_unit(
        p_k + nth * UNIT * s_k_token + head * s_k_head,
        p_v + nth * UNIT * s_v_token + head * s_v_head,
        s_k_token,
        s_v_token,
        tl.minimum(tokens - nth * UNIT, UNIT),
        p_means + at * (2 * D),
        p_deviation + at * D,
        VARIANCE,
        D,
        BLOCK_T,
        BLOCK_D,
    )


@triton.jit
def update_kernel(
    p_ring_k,
    p_ring_v,
    p_means,
    p_deviation,
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
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    T: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    VARIANCE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, kv-head): the open unit anew from the rings, whose strides are the same."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    unit = newest // UNIT
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    ring = slot * s_slot + (head // HEADS_PER_LANE) * s_lane
    ring += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
    _write_unit(
        p_ring_k + ring,
        p_ring_v + ring,
        s_token,
        s_token,
        newest % UNIT + 1,
        p_means + at * (2 * D),
        p_deviation + at * D,
        VARIANCE,
        D,
        BLOCK_T,
        BLOCK_D,
    )
