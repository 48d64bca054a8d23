"""Mean keys and mean sizes of their pairs in Triton, beside ``reference.summary``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write_unit(
    p_k,
    s_k,
    p_pairs,
    tokens,
    p_out,
    PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Of the first ``tokens`` keys at ``p_k``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    f = tl.arange(0, BLOCK_F)
    valid = (t < tokens) & (f < PAIRS)[None, :]
    first = tl.load(p_pairs + f, f < PAIRS, other=0)
    second = tl.load(p_pairs + PAIRS + f, f < PAIRS, other=0)
    rows = p_k + t.to(tl.int64) * s_k
    a = tl.load(rows + first[None, :], valid, other=0).to(tl.float32)
    b = tl.load(rows + second[None, :], valid, other=0).to(tl.float32)
    # By the larger of the two: squares of others would overflow, or vanish.
    large = tl.maximum(tl.abs(a), tl.abs(b))
    small = tl.minimum(tl.abs(a), tl.abs(b)) / tl.maximum(large, 1.1754943508222875e-38)
    size = tl.sum(large * tl.sqrt(1.0 + small * small), 0) / tokens
    there = f < PAIRS
    kind: tl.constexpr = p_out.dtype.element_ty
    tl.store(p_out + first, (tl.sum(a, 0) / tokens).to(kind), there)
    tl.store(p_out + second, (tl.sum(b, 0) / tokens).to(kind), there)
    tl.store(p_out + 2 * PAIRS + f, tl.minimum(size, LARGEST).to(kind), there)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_pairs,
    p_means,
    p_pages,
    first_unit,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
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
        p_pairs,
        tl.minimum(tokens - nth * UNIT, UNIT),
        p_means + at * 3 * PAIRS,
        PAIRS,
        LARGEST,
        BLOCK_T,
        BLOCK_F,
    )


@triton.jit
def update_kernel(
    p_ring,
    p_pairs,
    p_means,
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
    PAIRS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
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
        p_pairs,
        newest % UNIT + 1,
        p_means + at * 3 * PAIRS,
        PAIRS,
        LARGEST,
        BLOCK_T,
        BLOCK_F,
    )
