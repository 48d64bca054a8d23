"""Mean directions of units in Triton, beside ``reference.directions``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_unit(
    p_k, s_k, tokens, p_out, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Of the first ``tokens`` keys at ``p_k``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    valid = (t < tokens) & (d < D)[None, :]
    k = tl.load(p_k + t.to(tl.int64) * s_k + d[None, :], valid, other=0).to(tl.float32)
    largest = tl.max(tl.abs(k), 1)
    k = k / tl.maximum(largest, 1.1754943508222875e-38)[:, None]
    length = tl.sqrt(tl.sum(k * k, 1))
    mean = tl.sum(k / tl.maximum(length, 1e-30)[:, None], 0) / tokens
    tl.store(p_out + d, mean.to(p_out.dtype.element_ty), d < D)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_directions,
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
    """Program (unit of the chunk, kv-head); ``p_pages`` is the request's row of pages."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    unit = first_unit + nth
    page = tl.load(p_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    _write_unit(
        p_k + nth * UNIT * s_token + head * s_head,
        s_token,
        tl.minimum(tokens - nth * UNIT, UNIT),
        p_directions + at * D,
        D,
        BLOCK_T,
        BLOCK_D,
    )


@triton.jit
def update_kernel(
    p_ring,
    p_directions,
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
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, kv-head): the open unit anew from the ring; of units of one token from the
    new keys, whose stride of a row is ``s_slot``."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    unit = newest // UNIT
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    if UNIT == 1:
        ring = row * s_slot + head * s_head
    else:
        ring = slot * s_slot + (head // HEADS_PER_LANE) * s_lane
        ring += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
    _write_unit(
        p_ring + ring,
        s_token,
        newest % UNIT + 1,
        p_directions + at * D,
        D,
        BLOCK_T,
        BLOCK_D,
    )
