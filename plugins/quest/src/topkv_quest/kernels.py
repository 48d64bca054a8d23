"""How Quest selects, in Triton, beside ``reference.head_scores`` and ``ScoredUnits.combine``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_kernel(
    p_q,
    p_bounds,
    p_scale,
    p_slots,
    p_lengths,
    p_pages,
    p_raw,
    p_peak,
    p_mass,
    max_pages,
    max_units,
    blocks,
    logit_scale,
    s_q_row,
    s_q_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE_U: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALED: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of units): scaled scores of the head's query heads, and the
    maximum and the exponential sum of the block.

    ``max(q m, q M)`` is ``max(q, 0) M + min(q, 0) m``: two products for the tensor cores, with
    exact factors and fp32 sums. A program pipelines ``TILES`` tiles. ``FP32`` multiplies in
    fp32, for fp32 queries and for the interpreter, which has no bfloat16 product.
    """
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0) // UNIT
    if (slot < 0) | (block * TILES * TILE_U >= closed):
        return
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    in_d = d < D
    in_g = g < GROUP
    p_q += row * s_q_row + head * GROUP * s_q_head
    in_q = in_g[None, :] & in_d[:, None]
    q = tl.load(p_q + g.to(tl.int64)[None, :] * s_q_head + d[:, None], in_q, other=0.0)
    if FP32:
        q = q.to(tl.float32)
    zero = tl.zeros_like(q)
    above = tl.where(q > 0, q, zero)
    below = tl.where(q < 0, q, zero)
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        u = (block * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        in_u = u < closed
        page = tl.load(p_pages + slot * max_pages + u // UNITS_PER_PAGE, in_u, other=0)
        at = (page.to(tl.int64) * UNITS_PER_PAGE + u % UNITS_PER_PAGE) * KV_HEADS + head
        p_tile = p_bounds + at[:, None] * (2 * D) + d[None, :]
        in_tile = in_u[:, None] & in_d[None, :]
        low = tl.load(p_tile, in_tile, other=0).to(q.dtype)
        high = tl.load(p_tile + D, in_tile, other=0).to(q.dtype)
        scores = tl.dot(high, above, input_precision="ieee")
        scores = tl.dot(low, below, acc=scores, input_precision="ieee")
        if SCALED:
            scores *= tl.load(p_scale + at, in_u, other=0.0).to(tl.float32)[:, None]
        scores = scores * logit_scale
        p_out = p_raw + first[None, :] * max_units + u[:, None]
        tl.store(p_out, scores, in_u[:, None] & in_g[None, :])
        scores = tl.where(in_u[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        mass = mass * tl.exp(peak - higher) + tl.sum(tl.exp(scores - higher[None, :]), 0)
        peak = higher
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)


@triton.jit
def _normalisers(
    p_peak,
    p_mass,
    head,
    in_h,
    used,
    blocks,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Maximum of each head's scores, and the log of the exponential sum below it."""
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, used, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = head[:, None] * blocks + p[None, :]
        inside = in_h[:, None] & (p < used)[None, :]
        peaks = tl.load(p_peak + at, inside, other=float("-inf"))
        peaks = tl.where(in_h[:, None], peaks, 0.0)
        masses = tl.load(p_mass + at, inside, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 1))
        total = total * tl.exp(peak - higher) + tl.sum(masses * tl.exp(peaks - higher[:, None]), 1)
        peak = higher
    return peak, tl.log(tl.where(in_h, total, 1.0))


@triton.jit
def combine_kernel(
    p_raw,
    p_peak,
    p_mass,
    p_slots,
    p_lengths,
    p_scores,
    p_closed,
    max_units,
    blocks,
    sink_units,
    LANE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (lane, block of units): log of the sum of the softmaxes of ``HEADS`` query heads.

    One head gives its scores as they are.
    """
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0) // UNIT
    closed = tl.where(slot < 0, 0, closed)
    if block == 0:
        tl.store(p_closed + lane, closed)
    if block * BLOCK_V >= closed:
        return
    h = tl.arange(0, BLOCK_H)
    in_h = h < HEADS
    head = lane * HEADS + h
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = v < closed
    inside = in_h[:, None] & in_v[None, :]
    x = tl.load(p_raw + head[:, None] * max_units + v[None, :], inside, other=float("-inf"))
    if HEADS > 1:
        used = (closed + BLOCK_U - 1) // BLOCK_U
        peak, log = _normalisers(p_peak, p_mass, head, in_h, used, blocks, BLOCK_H, BLOCK_P)
        # The maximum first: near it the difference of two scores is exact.
        x = x - peak[:, None] - log[:, None]
    best = tl.max(x, 0)
    if HEADS > 1:
        shares = tl.exp(x - tl.where(in_v, best, 0.0)[None, :])
        best += tl.log(tl.where(in_v, tl.sum(shares, 0), 1.0))
    best = tl.where(v < sink_units, float("inf"), best)
    tl.store(p_scores + lane * max_units + v, best, in_v)
