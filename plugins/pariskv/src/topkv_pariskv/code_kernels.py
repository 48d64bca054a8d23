"""Rotation and codes in Triton, beside ``reference.rotate`` and ``reference.encode``.

Launched without fused multiply-adds: sums round as those of the reference do, bit for bit.
Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.outliers_kernels import pair_sum, split


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
def _encode(
    k,
    signs,
    at,
    writes,
    pools,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Codes and outliers of keys ``k [ROWS, WIDE]`` to rows ``at`` of pools, where ``writes``."""
    p_codes, p_factor, p_words = pools
    k, left = split(k.to(tl.float32), p_words + at * PAIRS, writes, ROWS, WIDE, LOG_WIDE, D, PAIRS)
    z = _rotate(k, signs, ROWS, WIDE, LOG_WIDE)
    length = pair_sum(tl.abs(z), ROWS, WIDE, LOG_WIDE)
    square = pair_sum(k * k, ROWS, WIDE, LOG_WIDE)
    factor = tl.div_rn(square, tl.where(length > 0, length, 1.0))
    bits = factor.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to bfloat16, ties to even
    bits |= tl.where(left, 0x8000, 0)
    tl.store(p_factor + at, bits.to(tl.int16), writes)
    negative = tl.reshape((z < 0).to(tl.int32), [ROWS, WIDE // 16, 16])
    words = tl.sum(negative << tl.arange(0, 16)[None, None, :], 2)
    word = tl.arange(0, WIDE // 16)
    p_words = p_codes + at[:, None] * (WIDE // 16) + word[None, :]
    tl.store(p_words, words.to(tl.int16), writes[:, None])


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_signs,
    p_codes,
    p_factor,
    p_words,
    p_pages,
    start,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (block of tokens of the chunk, kv-head); ``p_pages`` is the request's page row."""
    head = tl.program_id(1).to(tl.int64)
    nth = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, WIDE)
    writes = nth < tokens
    token = start + nth
    page = tl.load(p_pages + token // PAGE, writes, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    p_tile = p_k + nth[:, None] * s_token + head * s_head + d[None, :]
    k = tl.load(p_tile, writes[:, None] & (d < D)[None, :], other=0.0)
    signs = tl.load(p_signs + d)
    pools = p_codes, p_factor, p_words
    _encode(k, signs, at, writes, pools, BLOCK_T, WIDE, LOG_WIDE, D, PAIRS)


@triton.jit
def update_kernel(
    p_k,
    p_signs,
    p_codes,
    p_factor,
    p_words,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (row): the codes of all kv-heads of the new token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    page = tl.load(p_pages + slot * max_pages + newest // PAGE).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    d = tl.arange(0, WIDE)
    writes = head < KV_HEADS
    at = (page * PAGE + newest % PAGE) * KV_HEADS + head
    p_tile = p_k + row * s_token + head[:, None] * s_head + d[None, :]
    k = tl.load(p_tile, writes[:, None] & (d < D)[None, :], other=0.0)
    signs = tl.load(p_signs + d)
    pools = p_codes, p_factor, p_words
    _encode(k, signs, at, writes, pools, BLOCK_H, WIDE, LOG_WIDE, D, PAIRS)


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
    """Program (row x kv-head): its query heads rotated, fp32 ``[BLOCK_G, WIDE]``."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // KV_HEADS
    if tl.load(p_slots + row) < 0:
        return
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, WIDE)
    p_tile = p_q + row * s_row + (pair % KV_HEADS * GROUP + g[:, None]) * s_head + d[None, :]
    q = tl.load(p_tile, (g < GROUP)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    z = _rotate(q, tl.load(p_signs + d), BLOCK_G, WIDE, LOG_WIDE)
    tl.store(p_rotated + (pair * BLOCK_G + g[:, None]) * WIDE + d[None, :], z)
