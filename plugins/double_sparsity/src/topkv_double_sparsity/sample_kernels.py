"""The sample of the tokens in Triton, beside ``reference.sampled`` and ``lane_scores``.

Names and columns as in ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_double_sparsity.products import appended_of, exp2, prepare_query, products


@triton.jit
def stride_of(closed, SAMPLE: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Distance of the tokens of the sample."""
    stride = 1
    for _ in tl.static_range(DOUBLINGS):
        stride = tl.where(closed > SAMPLE * stride, 2 * stride, stride)
    return stride


@triton.jit
def sample_size(closed, stride):
    """Tokens of the sample."""
    return (closed - stride // 2 + stride - 1) // stride


@triton.jit
def sample_kernel(
    p_q,
    p_channels,
    p_ranges,
    p_query,
    p_total,
    p_peak,
    p_mass,
    p_labels,
    p_meta,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    blocks,
    scale,
    s_q_row,
    s_q_head,
    s_channels,
    s_ranges,
    SAMPLING: tl.constexpr,
    SAMPLE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x bundle, block of the sample): of each column the maximum of the logits, and
    the sum of ``2 ** (logit - maximum)``.

    The first program of a bundle also writes its matrix of queries and the sums of its columns.
    """
    bundle = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = bundle // (KV_HEADS // HEADS)
    first = bundle % (KV_HEADS // HEADS) * HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    new, held = appended_of(p_appended, row, GROUP, QUERIES)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0)
    stride = stride_of(closed, SAMPLE, DOUBLINGS)
    size = sample_size(closed, stride)
    start = block * (TILES * TILE)
    if (slot < 0) | (start >= size):
        return
    p_q += row * s_q_row + first * GROUP * s_q_head
    p_channels += slot * s_channels + first * R
    p_ranges += slot * s_ranges + first * (2 * R)
    queries, total = prepare_query(
        *(p_q, p_channels, p_ranges, p_query, p_total, s_q_head, held, bundle, block, scale),
        *(R, WORDS, HEADS, GROUP, BLOCK_K, BLOCK_H, BLOCK_G, PARTS, FP32),
    )
    if not SAMPLING:
        return
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    peak = tl.full([BLOCK_C], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_C], tl.float32)
    for tile in tl.range(0, tl.minimum(TILES, tl.cdiv(size - start, TILE)), num_stages=STAGES):
        t = (start + tile * TILE + tl.arange(0, TILE)) * stride + stride // 2
        in_t = t < closed
        page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
        at = page.to(tl.int64) * PAGE + t % PAGE
        x = products(
            *(p_labels, p_meta, at, in_t, first, queries, total, scale, mass * 0),
            *(KV_HEADS, WORDS, HEADS, BLOCK_K, BLOCK_H, BLOCK_G, PARTS, False),
        )
        higher = tl.maximum(peak, tl.max(tl.where(in_t[:, None], x, float("-inf")), 0))
        shrink = tl.exp2(tl.where(mass > 0, peak - higher, 0.0))
        weight = exp2(tl.where(in_t[:, None], x - higher[None, :], -1e30), FAST)
        mass = mass * shrink + tl.sum(weight, 0)
        peak = higher
    out = (bundle * blocks + block) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(p_peak + out, peak)
    tl.store(p_mass + out, mass)


@triton.jit
def normalisers(
    p_peak,
    p_mass,
    bundle,
    blocks,
    used,
    BUNDLES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Maximum, and log of the exponential sum below it; ``[BLOCK_B, BLOCK_C]`` each.

    Of the columns of bundles ``bundle .. bundle + BUNDLES - 1``, merged from ``used`` blocks.
    """
    b = tl.arange(0, BLOCK_B)[:, None, None]
    p = tl.arange(0, BLOCK_P)[None, :, None]
    at = ((bundle + b) * blocks + p) * BLOCK_C + tl.arange(0, BLOCK_C)[None, None, :]
    inside = (b < BUNDLES) & (p < used) & (at >= 0)
    peaks = tl.load(p_peak + at, inside, other=float("-inf"))
    peak = tl.max(peaks, 1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    grow = tl.exp2(tl.where(inside, peaks - peak[:, None, :], 0.0))
    masses = tl.load(p_mass + at, inside, other=0.0)
    mass = tl.maximum(tl.sum(masses * grow, 1), 2.0**-100)
    return peak, tl.log2(mass)
