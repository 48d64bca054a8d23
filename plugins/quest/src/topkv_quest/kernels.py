"""How Quest selects, in Triton, beside ``reference.head_scores``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.lane_scores_kernels import fold


@triton.jit
def places(p_row, u, in_u, UNITS_PER_PAGE: tl.constexpr):
    """Host units at which the units ``u`` of a request lie, whose pages are at ``p_row``."""
    page = tl.load(p_row + u // UNITS_PER_PAGE, in_u, other=0)
    return page.to(tl.int64) * UNITS_PER_PAGE + u % UNITS_PER_PAGE


@triton.jit
def signs(q):
    """Queries where they are positive and where they are negative, 0 elsewhere."""
    zero = tl.zeros_like(q)
    return tl.where(q > 0, q, zero), tl.where(q < 0, q, zero)


@triton.jit
def bounded(scores, above, below, p_tile, in_tile, D: tl.constexpr):
    """``scores`` and the bounds of a tile's units over some channels.

    ``max(q m, q M)`` is ``max(q, 0) M + min(q, 0) m``: two products for the tensor cores, with
    exact factors and fp32 sums.
    """
    low = tl.load(p_tile, in_tile, other=0).to(above.dtype)
    high = tl.load(p_tile + D, in_tile, other=0).to(above.dtype)
    scores = tl.dot(high, above, acc=scores, input_precision="ieee")
    return tl.dot(low, below, acc=scores, input_precision="ieee")


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

    A program pipelines ``TILES`` tiles. ``FP32`` multiplies in fp32, for fp32 queries and for the
    interpreter, which has no bfloat16 product.
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
    above, below = signs(q)
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        u = (block * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        in_u = u < closed
        at = places(p_pages + slot * max_pages, u, in_u, UNITS_PER_PAGE) * KV_HEADS + head
        p_tile = p_bounds + at[:, None] * (2 * D) + d[None, :]
        scores = tl.zeros([TILE_U, BLOCK_G], tl.float32)
        scores = bounded(scores, above, below, p_tile, in_u[:, None] & in_d[None, :], D)
        if SCALED:
            scores *= tl.load(p_scale + at, in_u, other=0.0).to(tl.float32)[:, None]
        scores *= logit_scale
        p_out = p_raw + first[None, :] * max_units + u[:, None]
        tl.store(p_out, scores, in_u[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_u)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)


@triton.jit
def wide_score_kernel(
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
    """``score_kernel`` of keys and groups that are too large for the registers: program (row x
    kv-head x block of its query heads, block of units). Queries come with the bounds, ``BLOCK_D``
    channels at a time, and ``STAGES`` of both are in flight.
    """
    parts = (GROUP + BLOCK_G - 1) // BLOCK_G
    pair = (tl.program_id(0) // parts).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0) // UNIT
    if (slot < 0) | (block * TILES * TILE_U >= closed):
        return
    channels = tl.arange(0, BLOCK_D)
    g = tl.program_id(0) % parts * BLOCK_G + tl.arange(0, BLOCK_G)
    in_g = g < GROUP
    p_heads = p_q + row * s_q_row + (head * GROUP + g).to(tl.int64)[None, :] * s_q_head
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in range(TILES):
        u = (block * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        in_u = u < closed
        at = places(p_pages + slot * max_pages, u, in_u, UNITS_PER_PAGE) * KV_HEADS + head
        scores = tl.zeros([TILE_U, BLOCK_G], tl.float32)
        for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            d = start + channels
            in_d = d < D
            q = tl.load(p_heads + d[:, None], in_g[None, :] & in_d[:, None], other=0.0)
            if FP32:
                q = q.to(tl.float32)
            above, below = signs(q)
            p_tile = p_bounds + at[:, None] * (2 * D) + d[None, :]
            scores = bounded(scores, above, below, p_tile, in_u[:, None] & in_d[None, :], D)
        if SCALED:
            scores *= tl.load(p_scale + at, in_u, other=0.0).to(tl.float32)[:, None]
        scores *= logit_scale
        p_out = p_raw + first[None, :] * max_units + u[:, None]
        tl.store(p_out, scores, in_u[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_u)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
