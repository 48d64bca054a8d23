"""Rotation and codes in Triton, beside ``reference.rotate`` and ``reference.encode``.

Launched without fused multiply-adds: sums round as those of the reference do, bit for bit.
Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.outliers_kernels import pair_sum, split


@triton.jit
def _rotate(x, signs, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG_WIDE: tl.constexpr):
    """``H (signs * x)`` of fp32 ``x [ROWS, WIDE]``: ``LOG_WIDE`` steps over neighbours."""
    x = x * signs[None, :]
    for _ in tl.static_range(LOG_WIDE):
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDE // 2, 2]))
        both = tl.join(even + odd, even - odd)  # [ROWS, WIDE // 2, 2]
        x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, WIDE])
    return x


@triton.jit
def write_codes(p_key, tensors, at, slot, head, valid, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.encode`` of keys; ``OPTIONS`` are outliers, and a power of two of D or more and
    its logarithm."""
    PAIRS: tl.constexpr = OPTIONS[0]
    WIDE: tl.constexpr = OPTIONS[1]
    LOG_WIDE: tl.constexpr = OPTIONS[2]
    ROWS: tl.constexpr = p_key.shape[0]
    p_codes, p_factor, p_words, p_signs = tensors
    d = tl.arange(0, WIDE)
    k = tl.load(p_key[:, None] + d[None, :], valid[:, None] & (d < D)[None, :], other=0.0)
    signs = tl.load(p_signs + d)
    k, left = split(k.to(tl.float32), p_words + at * PAIRS, valid, ROWS, WIDE, LOG_WIDE, D, PAIRS)
    z = _rotate(k, signs, ROWS, WIDE, LOG_WIDE)
    length = pair_sum(tl.abs(z), ROWS, WIDE, LOG_WIDE)
    square = pair_sum(k * k, ROWS, WIDE, LOG_WIDE)
    factor = tl.div_rn(square, tl.where(length > 0, length, 1.0))
    bits = factor.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to bfloat16, ties to even
    bits |= tl.where(left, 0x8000, 0)
    tl.store(p_factor + at, bits.to(tl.int16), valid)
    negative = tl.reshape((z < 0).to(tl.int32), [ROWS, WIDE // 16, 16])
    words = tl.sum(negative << tl.arange(0, 16)[None, None, :], 2)
    word = tl.arange(0, WIDE // 16)
    p_words = p_codes + at[:, None] * (WIDE // 16) + word[None, :]
    tl.store(p_words, words.to(tl.int16), valid[:, None])


@triton.jit
def query_kernel(
    p_q,
    p_signs,
    p_slots,
    p_rotated,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (row x kv-head x block of query heads): these rotated, ``[BLOCK_G, WIDE]`` fp32."""
    PARTS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    part = tl.program_id(0).to(tl.int64)
    pair = part // PARTS
    row = pair // KV_HEADS
    if tl.load(p_slots + row) < 0:
        return
    nth, d = tl.arange(0, BLOCK_G), tl.arange(0, WIDE)
    g = part % PARTS * BLOCK_G + nth
    p_tile = p_q + row * s_row + (pair % KV_HEADS * GROUP + g[:, None]) * s_head + d[None, :]
    q = tl.load(p_tile, (g < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    z = _rotate(q, tl.load(p_signs + d), BLOCK_G, WIDE, LOG_WIDE)
    tl.store(p_rotated + (part * BLOCK_G + nth[:, None]) * WIDE + d[None, :], z)
