"""Kernels that score tokens, in Triton, beside ``reference.head_logits`` and ``lane_scores``.

Labels are read once, but for a sample: ``sample_kernel`` finds the normaliser of each query
head from it, and ``score_kernel`` writes one score for each lane and token.

A *bundle* is ``HEADS`` neighbouring kv-heads whose labels one wide load takes; one product with
a block-diagonal matrix of queries scores them all, in columns in the order that
``products.column`` gives. Exponents are of base 2. Names: ``p_`` pointers, ``s_`` strides in
elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_double_sparsity.products import (
    appended_of,
    by_head,
    column,
    exp2,
    log2,
    products,
    stored_query,
)
from topkv_double_sparsity.sample_kernels import normalisers, sample_size, stride_of


@triton.jit
def score_kernel(
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
    p_scores,
    p_closed,
    max_pages,
    blocks,
    scale,
    s_scores,
    sinks,
    BUNDLES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
    NORMALISED: tl.constexpr,
    SAMPLE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x bundle, block of tokens): one score for each lane and token, fp32.

    With ``PER_HEAD`` each kv-head of the bundle is a lane. Else a row is one lane, and the program
    takes all ``BUNDLES`` by turns, tile by tile. Without ``NORMALISED`` a lane has one query head,
    and its scores are its logits; else they are the log-sum-exp over the heads, in base 2. The
    first program of a lane writes how many tokens it has.
    """
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    LANES: tl.constexpr = HEADS if PER_HEAD else 1
    BLOCK_L: tl.constexpr = BLOCK_H if PER_HEAD else 1
    ROW: tl.constexpr = KV_HEADS // (HEADS * BUNDLES)
    program = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = program // ROW
    bundle = program * BUNDLES
    first = program % ROW * HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    new, held = appended_of(p_appended, row, GROUP, QUERIES)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0)
    closed = tl.where(slot < 0, 0, closed)
    nth = tl.arange(0, BLOCK_L)
    lane = program * LANES + nth
    in_lane = nth < LANES
    if block == 0:
        tl.store(p_closed + lane, closed + nth * 0, in_lane)
    start = block * (TILES * TILE)
    if start >= closed:
        return
    b = tl.arange(0, BLOCK_B)[:, None]
    c = tl.arange(0, BLOCK_C)
    head, g = column(c, BLOCK_H, BLOCK_G)
    real = ((head < HEADS) & (g < held))[None, :] & (b < BUNDLES)
    totals = tl.load(p_total + (bundle + b) * BLOCK_C + c[None, :], real, other=0.0)
    peaks, logs = totals, totals
    if NORMALISED:
        size = sample_size(closed, stride_of(closed, SAMPLE, DOUBLINGS))
        peaks, logs = normalisers(
            *(p_peak, p_mass, bundle, blocks, (size + SPAN - 1) // SPAN),
            *(BUNDLES, BLOCK_B, BLOCK_P, BLOCK_C),
        )
        logs = tl.where(real, logs, 1e30)  # a column of no query head weighs nothing
    queries = stored_query(p_query, bundle, BLOCK_K, BLOCK_C, PARTS, FP32)
    offsets = peaks + logs if NORMALISED else totals * 0
    total, offset = tl.sum(totals, 0), tl.sum(offsets, 0)
    best = tl.full([TILE], -1e30, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    tiles = tl.minimum(TILES, tl.cdiv(closed - start, TILE))
    for step in tl.range(0, tiles * BUNDLES, num_stages=STAGES):
        begin = start + step // BUNDLES * TILE
        if BUNDLES > 1:
            turn = step % BUNDLES
            first = (turn * HEADS).to(tl.int64)
            queries = stored_query(p_query, bundle + turn, BLOCK_K, BLOCK_C, PARTS, FP32)
            mine = b == turn
            total = tl.sum(tl.where(mine, totals, 0.0), 0)
            offset = tl.sum(tl.where(mine, offsets, 0.0), 0)
        t = begin + tl.arange(0, TILE)
        in_t = t < closed
        if PAGE % TILE == 0:
            # The labels of the tile are in a row, and one address gives all of them.
            page = tl.load(p_pages + slot * max_pages + begin // PAGE).to(tl.int64)
            at = page * PAGE + begin % PAGE + tl.arange(0, TILE)
        else:
            page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
            at = page.to(tl.int64) * PAGE + t % PAGE
        x = products(
            *(p_labels, p_meta, at, in_t, first, queries, total, scale, offset),
            *(KV_HEADS, WORDS, HEADS, BLOCK_K, BLOCK_H, BLOCK_G, PARTS),
            WHOLE=PAGE % TILE == 0,
        )
        if PER_HEAD:
            x = by_head(x, BLOCK_H, BLOCK_G)
            if NORMALISED:
                higher = tl.max(tl.max(x, 3), 1)
                weight = exp2(x - higher[:, None, :, None], FAST)
                score = higher + log2(tl.sum(tl.sum(weight, 3), 1), FAST)
            else:
                score = tl.sum(tl.sum(x, 3), 1)  # of one column, beside columns of zeros
            score = tl.where((t < sinks)[:, None], float("inf"), score)
            p_out = p_scores + lane[None, :] * s_scores + t[:, None]
            # Without a mask, a thread writes its neighbouring tokens as one word.
            if (LANES == BLOCK_L) & (begin + TILE <= closed):
                tl.store(p_out, score)
            else:
                tl.store(p_out, score, in_t[:, None] & in_lane[None, :])
        else:
            fresh = step % BUNDLES == 0
            best = tl.where(fresh, -1e30, best)
            mass = tl.where(fresh, 0.0, mass)
            higher = tl.maximum(best, tl.max(x, 1))
            mass = mass * exp2(best - higher, FAST)
            mass += tl.sum(exp2(x - higher[:, None], FAST), 1)
            best = higher
            score = tl.where(t < sinks, float("inf"), best + log2(mass, FAST))
            if step % BUNDLES == BUNDLES - 1:
                p_out = p_scores + row * s_scores + t
                if begin + TILE <= closed:
                    tl.store(p_out, score)
                else:
                    tl.store(p_out, score, in_t)
