"""Kernels that score codes, in Triton, beside ``reference.head_scores``.

Names: ``p_`` pointers. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.lane_scores_kernels import fold, tokens_before
from topkv_authoring.outliers_kernels import products


@triton.jit
def _query(p_rotated, BIT: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr,
           BLOCK_G: tl.constexpr, FP32: tl.constexpr):  # fmt: skip
    """The coordinates whose signs stand at a bit of each byte, ``[2 BLOCK_G, BYTES]``.

    In bfloat16, and below it what bfloat16 leaves of them; in fp32 that is nothing.
    """
    byte, row = tl.arange(0, BYTES), tl.arange(0, 2 * BLOCK_G)
    at = (row % BLOCK_G)[:, None] * WIDE + 8 * byte[None, :] + BIT
    q = tl.load(p_rotated + at, (byte < WIDE // 8)[None, :], other=0.0)
    high = q if FP32 else q.to(tl.bfloat16)
    low = (q - high.to(tl.float32)).to(high.dtype)
    return tl.where((row < BLOCK_G)[:, None], high, low)


@triton.jit
def _add(scores, q, codes, BIT: tl.constexpr, FP32: tl.constexpr):
    """Scores and the part of a bit: it is shifted to the sign of a bfloat16 1.0."""
    signs = ((codes.to(tl.int16) << (15 - BIT)) & -0x8000 | 0x3F80).to(tl.int16)
    signs = signs.to(tl.bfloat16, bitcast=True)
    if FP32:
        signs = signs.to(tl.float32)
    return tl.dot(q, signs, acc=scores, input_precision="ieee")


@triton.jit
def score_kernel(
    p_q,
    p_rotated,
    p_codes,
    p_factor,
    p_words,
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
    logit_scale,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head x block of query heads, block of tokens): scaled scores, and the
    maximum and the exponential sum of the block. GROUP heads are those of all QUERIES of a row.

    Codes are read as bytes. A bit of all bytes of a code is one product for the tensor cores,
    whose operand the threads make of the bytes that they hold, where a whole code would have to be
    laid out anew in shared memory. Signs are exact in bfloat16, a rotated query is two bfloat16
    numbers, and sums are fp32. ``FP32`` multiplies in fp32, for fp32 models and for the
    interpreter, which has no bfloat16 product. What left keys is read where a factor of the tile
    says that something did.
    """
    PARTS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    part = tl.program_id(0).to(tl.int64)
    pair = part // PARTS
    block = tl.program_id(1)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tokens_before(p_lengths, p_appended, row, QUERIES)
    if (slot < 0) | (block * TILES * TILE >= closed):
        return
    p_z = p_rotated + part * BLOCK_G * WIDE
    queries = ()
    for bit in tl.static_range(8):
        query = _query(p_z, bit, WIDE, BYTES, BLOCK_G, FP32)
        queries = queries + (query,)  # noqa: RUF005 - no star
    byte, g = tl.arange(0, BYTES), part % PARTS * BLOCK_G + tl.arange(0, BLOCK_G)
    in_g, first = g < GROUP, pair * GROUP + g
    p_heads = p_q + row * s_row + (head * GROUP + g) * s_head
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    start = block * TILES * TILE
    # One stage: loads ahead of their tile would come by way of shared memory.
    for tile in tl.range(0, tl.minimum(TILES, tl.cdiv(closed - start, TILE)), num_stages=1):
        t = start + tile * TILE + tl.arange(0, TILE)
        in_t = t < closed
        page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
        at = (page.to(tl.int64) * PAGE + t % PAGE) * KV_HEADS + head
        inside = in_t[None, :] & (byte < WIDE // 8)[:, None]
        codes = tl.load(p_codes + at[None, :] * (WIDE // 8) + byte[:, None], inside, other=0)
        both = tl.zeros([2 * BLOCK_G, TILE], tl.float32)
        for bit in tl.static_range(8):
            both = _add(both, queries[bit], codes, bit, FP32)
        scores = tl.sum(tl.reshape(both, [2, BLOCK_G, TILE]), 0)
        factor = tl.load(p_factor + at, in_t, other=0.0).to(tl.float32)
        scores = scores * tl.abs(factor)[None, :]
        left = in_t & (factor.to(tl.int32, bitcast=True) < 0)  # -0.0 among them
        if tl.max(left.to(tl.int32), 0) != 0:
            scores += products(p_words + at * PAIRS, left, p_heads, in_g, D, PAIRS)
        scores = scores * logit_scale
        p_out = p_raw + first[:, None] * max_units + t[None, :]
        tl.store(p_out, scores, in_t[None, :] & in_g[:, None])
        peak, mass = fold(peak, mass, tl.trans(scores), in_t)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
