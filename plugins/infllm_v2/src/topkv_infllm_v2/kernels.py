"""Compressed keys in Triton, beside ``reference``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.lane_scores_kernels import fold, tokens_before
from topkv_authoring.language import store


@triton.jit
def places(p_row, part, there, KV_HEADS, head, PARTS: tl.constexpr, UNITS_PER_PAGE: tl.constexpr):
    """Rows of the pool with the means of parts of a request, whose pages are at ``p_row``."""
    unit = part // PARTS
    page = tl.load(p_row + unit // UNITS_PER_PAGE, there, other=0).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    return at * PARTS + part % PARTS


@triton.jit
def write_means(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.part_means`` of a part, of ``OPTIONS[0]`` tokens."""
    d = tl.arange(0, k.shape[1])
    store(pools[0] + at * D + d, tl.sum(k, 0) / OPTIONS[0], d < D)


@triton.jit
def window_kernel(
    p_q,
    p_means,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    p_raw,
    p_peak,
    p_mass,
    max_pages,
    max_parts,
    blocks,
    logit_scale,
    s_q_row,
    s_q_head,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FP32: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row x kv-head x block of its query heads, block of windows): scaled logits of the
    heads, and the maximum and the exponential sum of the block. The ``GROUP`` heads of a kv-head
    are those of all QUERIES of the row.

    ``FP32`` multiplies in fp32, for fp32 queries and for the interpreter.
    """
    HELD: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    pair, block = (tl.program_id(0) // HELD).to(tl.int64), tl.program_id(1)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    parts = tokens_before(p_lengths, p_appended, row, QUERIES) // STRIDE
    if (slot < 0) | (block * TILES * TILE >= parts):
        return
    d = tl.arange(0, BLOCK_D)
    g = tl.program_id(0) % HELD * BLOCK_G + tl.arange(0, BLOCK_G)
    in_d, in_g = d < D, g < GROUP
    p_q += row * s_q_row + head * GROUP * s_q_head
    in_q = in_g[None, :] & in_d[:, None]
    q = tl.load(p_q + g.to(tl.int64)[None, :] * s_q_head + d[:, None], in_q, other=0.0)
    if FP32:
        q = q.to(tl.float32)
    p_row = p_pages + slot * max_pages
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        w = (block * TILES + tile) * TILE + tl.arange(0, TILE)
        there, follows = w < parts, w + 1 < parts
        at = places(p_row, w, there, KV_HEADS, head, PARTS, UNITS_PER_PAGE)
        then = places(p_row, w + 1, follows, KV_HEADS, head, PARTS, UNITS_PER_PAGE)
        own = tl.load(p_means + at[:, None] * D + d, there[:, None] & in_d, other=0.0)
        following = tl.load(p_means + then[:, None] * D + d, follows[:, None] & in_d, other=0.0)
        scores = tl.dot(own.to(q.dtype), q, input_precision="ieee")
        scores = tl.dot(following.to(q.dtype), q, acc=scores, input_precision="ieee")
        scores *= tl.where(follows, 0.5, 1.0)[:, None] * logit_scale
        p_out = p_raw + first[None, :] * max_parts + w[:, None]
        tl.store(p_out, scores, there[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, there)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)


@triton.jit
def unit_kernel(
    p_windows,
    p_slots,
    p_lengths,
    p_appended,
    p_scores,
    p_closed,
    max_units,
    sinks,
    recent,
    LANE_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Program (lane, block of units): the best window of each closed unit; forced ones +inf."""
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = lane // LANE_HEADS
    before = tokens_before(p_lengths, p_appended, row, QUERIES)
    before = tl.where(tl.load(p_slots + row) < 0, 0, before)
    closed, parts = before // UNIT, before // STRIDE
    if block == 0:
        tl.store(p_closed + lane, closed)
    u = block * BLOCK_U + tl.arange(0, BLOCK_U)
    in_u = u < closed
    best = tl.full([BLOCK_U], float("-inf"), tl.float32)
    for offset in tl.static_range(PARTS + 1):
        w = u * PARTS + offset - 1
        p_at = p_windows + lane * (max_units * PARTS) + w
        there = in_u & (w >= 0) & (w < parts)
        best = tl.maximum(best, tl.load(p_at, there, other=float("-inf")))
    best = tl.where((u < sinks) | (u >= closed - recent), float("inf"), best)
    tl.store(p_scores + lane * max_units + u, best, in_u)
