"""How codes are scored, in Triton, beside ``reference.head_scores``.

Names: ``p_`` pointers. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.lane_scores_kernels import fold


@triton.jit
def _signs(words, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """bfloat16 1 and -1, ``[ROWS, WIDE]``: the bits of a code are shifted to the sign of 1.0."""
    shift = (15 - tl.arange(0, 16)).to(tl.int16)
    sign = (words[:, :, None] << shift[None, None, :]) & -0x8000
    return tl.reshape((sign | 0x3F80).to(tl.int16), [ROWS, WIDE]).to(tl.bfloat16, bitcast=True)


@triton.jit
def score_kernel(
    p_rotated,
    p_codes,
    p_factor,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of tokens): scaled scores of the head's query heads, and the
    maximum and the exponential sum of the block.

    Signs are exact in bfloat16, and a rotated query is two bfloat16 numbers: two products for the
    tensor cores, with fp32 sums. ``FP32`` multiplies in fp32, for fp32 models and for the
    interpreter, which has no bfloat16 product.
    """
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    if (slot < 0) | (block * TILES * TILE >= closed):
        return
    d = tl.arange(0, WIDE)
    g = tl.arange(0, BLOCK_G)
    word = tl.arange(0, WIDE // 16)
    in_g = g < GROUP
    q = tl.load(p_rotated + (pair * BLOCK_G + g[None, :]) * WIDE + d[:, None])
    high = q.to(tl.bfloat16)
    low = (q - high.to(tl.float32)).to(tl.bfloat16)
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    start = block * TILES * TILE
    for tile in tl.range(0, tl.minimum(TILES, tl.cdiv(closed - start, TILE)), num_stages=STAGES):
        t = start + tile * TILE + tl.arange(0, TILE)
        in_t = t < closed
        page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
        at = (page.to(tl.int64) * PAGE + t % PAGE) * KV_HEADS + head
        p_words = p_codes + at[:, None] * (WIDE // 16) + word[None, :]
        signs = _signs(tl.load(p_words, in_t[:, None], other=0), TILE, WIDE)
        if FP32:
            scores = tl.dot(signs.to(tl.float32), q, input_precision="ieee")
        else:
            scores = tl.dot(signs, high)
            scores = tl.dot(signs, low, acc=scores)
        factor = tl.load(p_factor + at, in_t, other=0.0).to(tl.float32)
        scores = scores * factor[:, None] * logit_scale
        p_out = p_raw + first[None, :] * max_units + t[:, None]
        tl.store(p_out, scores, in_t[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_t)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
