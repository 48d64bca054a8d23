"""Kernels that score bounds, in Triton, beside ``reference.head_scores``.

Names: ``p_`` pointers, ``s_`` strides in elements. Bounds are addressed by host page in 64 bit, as
``reference.by_page`` packs them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.bounds import key_bounds
from topkv_authoring.lane_scores_kernels import fold, tokens_before
from topkv_authoring.language import store


@triton.jit
def write_bounds(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.minmax`` of a unit, to its place in its page: ``OPTIONS`` are the kv-heads and
    the units of a page."""
    unit, head = at // OPTIONS[0], at % OPTIONS[0]
    page, place = unit // OPTIONS[1], unit % OPTIONS[1]
    d = tl.arange(0, k.shape[1])
    low, high = key_bounds(k, valid)
    p_page = pools[0] + (page * OPTIONS[0] + head) * (2 * D * OPTIONS[1]) + place
    store(p_page + d * OPTIONS[1], low, d < D)
    store(p_page + (D + d) * OPTIONS[1], high, d < D)


@triton.jit
def _best(size, in_d, count):
    """The ``count`` channels of the largest sizes, none of them negative; of equal ones the lower.

    The bits of such numbers are in their order, so the smallest size that is taken is found bit by
    bit.
    """
    keys = tl.where(in_d, size.to(tl.int32, bitcast=True), -1)
    least = tl.full((), 0, tl.int32)
    bit = tl.full((), 1 << 30, tl.int32)
    while bit > 0:
        enough = tl.sum((keys >= least + bit).to(tl.int32), 0) >= count
        least = tl.where(enough, least + bit, least)
        bit = bit >> 1
    above = keys > least
    equal = keys == least
    free = count - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= free))


@triton.jit
def query_kernel(
    p_q,
    p_slots,
    p_appended,
    p_unread,
    p_sides,
    p_factors,
    logit_scale,
    s_q_row,
    s_q_head,
    s_unread,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row x kv-head): which bound of each channel is read, 1 the maximum, -1 the minimum
    and 0 neither; and the factor of each query head, temperature times logit scale. The ``GROUP``
    heads of a kv-head are those of all QUERIES of the row, of which padding has no say.
    """
    pair = tl.program_id(0).to(tl.int64)
    row = pair // KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    in_g = g < GROUP
    if QUERIES > 1:
        in_g &= g // (GROUP // QUERIES) < tl.maximum(tl.load(p_appended + row), 1)
    in_q = in_g[:, None] & in_d[None, :]
    p_q += row * s_q_row + (pair % KV_HEADS * GROUP + g).to(tl.int64)[:, None] * s_q_head
    q = tl.load(p_q + d[None, :], in_q, other=0.0).to(tl.float32)
    size = tl.abs(q)
    count = D - tl.load(p_unread + slot * s_unread)
    chosen = _best(tl.sum(size, 0), in_d, count)
    side = tl.where(chosen, tl.where(tl.sum(q, 0) > 0, 1, -1), 0)
    tl.store(p_sides + pair * D + d, side.to(tl.int8), in_d)
    part = tl.sum(tl.where(chosen[None, :], size, 0.0), 1)
    known = part > 0
    share = tl.where(known, tl.sum(size, 1) / tl.where(known, part, 1.0), 1.0)
    tl.store(p_factors + pair * BLOCK_G + g, tl.sqrt(share) * logit_scale)


@triton.jit
def score_kernel(
    p_q,
    p_sides,
    p_factors,
    p_bounds,
    p_dropped,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    p_raw,
    p_peak,
    p_mass,
    max_pages,
    max_units,
    blocks,
    s_q_row,
    s_q_head,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    DROPPED: tl.constexpr,
    TILE_U: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of units): scaled scores of the head's query heads, and the
    maximum and the exponential sum of the block.

    Read are the bounds that ``query_kernel`` names, of units that are not dropped. ``FP32``
    multiplies in fp32, for fp32 models and for the interpreter, which has no bfloat16 product.
    """
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tokens_before(p_lengths, p_appended, row, QUERIES) // UNIT
    if (slot < 0) | (block * TILES * TILE_U >= closed):
        return
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    in_g = g < GROUP
    side = tl.load(p_sides + pair * D + d, d < D, other=0)
    read = side != 0
    p_q += row * s_q_row + (head * GROUP + g).to(tl.int64)[None, :] * s_q_head
    q = tl.load(p_q + d[:, None], in_g[None, :] & read[:, None], other=0.0)
    if FP32:
        q = q.to(tl.float32)
    factor = tl.load(p_factors + pair * BLOCK_G + g)
    lane = slot * (KV_HEADS // HEADS_PER_LANE) + head // HEADS_PER_LANE
    p_bounds += tl.where(side > 0, D + d, d)[None, :] * UNITS_PER_PAGE
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        u = (block * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        in_u = u < closed
        kept = in_u & (tl.load(p_dropped + lane * max_units + u, in_u, other=1) == 0)
        page = tl.load(p_pages + slot * max_pages + u // UNITS_PER_PAGE, kept, other=0)
        at = (page.to(tl.int64) * KV_HEADS + head) * (2 * D * UNITS_PER_PAGE) + u % UNITS_PER_PAGE
        bound = tl.load(p_bounds + at[:, None], kept[:, None] & read[None, :], other=0.0)
        scores = tl.dot(bound.to(q.dtype), q, input_precision="ieee") * factor[None, :]
        scores = tl.where(kept[:, None], scores, DROPPED)
        p_out = p_raw + first[None, :] * max_units + u[:, None]
        tl.store(p_out, scores, in_u[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_u)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
