"""4-bit copies of keys in Triton, beside ``reference.encode``.

Launched without fused multiply-adds: the same bits as those of the reference. Names: ``p_``
pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.outliers_kernels import split


@triton.jit
def _bf16_up(x):
    """The bits of fp32 ``x``, raised to the next bfloat16: the low half is 0."""
    bits = x.to(tl.int32, bitcast=True)
    whole = bits & -0x10000
    return tl.where((bits > 0) & (whole != bits), whole + 0x10000, whole)


@triton.jit
def _write(
    p_key,
    pools,
    at,
    valid,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
):
    """Copies of the keys ``p_key [ROWS]`` to rows ``at [ROWS]`` of the pools, where ``valid``."""
    p_codes, p_meta, p_words = pools
    d = tl.arange(0, WIDE)[None, :]
    inside = valid[:, None] & (d < D)
    key = tl.load(p_key[:, None] + d, inside, other=0).to(tl.float32)
    x, left = split(key, p_words + at * PAIRS, valid, ROWS, WIDE, LOG_WIDE, D, PAIRS)
    x += 0.0
    least = tl.min(tl.where(inside, x, float("inf")), 1)
    most = tl.max(tl.where(inside, x, float("-inf")), 1)
    zero = -_bf16_up(-tl.where(valid, least, 0.0)).to(tl.float32, bitcast=True) + 0.0
    span = tl.where(valid, most, 0.0) - zero
    raised = _bf16_up(tl.div_rn(span, 15.0 + tl.zeros_like(span)))
    scale = raised.to(tl.float32, bitcast=True)
    step = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(x)
    codes = tl.floor(tl.div_rn(x - zero[:, None], step) + 0.5)
    codes = tl.where(d < D, tl.minimum(tl.maximum(codes, 0.0), 15.0), 0.0).to(tl.int32)
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDE // 2, 2]))
    j = tl.arange(0, WIDE // 2)[None, :]
    WIDTH: tl.constexpr = (D + 1) // 2
    p_bytes = p_codes + at[:, None] * WIDTH + j
    tl.store(p_bytes, (low | high << 4).to(tl.uint8), valid[:, None] & (j < WIDTH))
    signed = raised | tl.where(left, -0x80000000, 0)
    tl.store(p_meta + at * 2, (signed >> 16).to(tl.int16), valid)
    tl.store(p_meta + at * 2 + 1, (zero.to(tl.int32, bitcast=True) >> 16).to(tl.int16), valid)


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_codes,
    p_meta,
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
    """Program (tokens of the chunk, kv-head); ``p_pages`` is the request's row of pages."""
    nth = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    valid = nth < tokens
    token = start + nth
    page = tl.load(p_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    p_key = p_k + nth * s_token + head * s_head
    pools = p_codes, p_meta, p_words
    _write(p_key, pools, at, valid, D, PAIRS, BLOCK_T, WIDE, LOG_WIDE)


@triton.jit(do_not_specialize=["batch"])
def update_kernel(
    p_k,
    p_codes,
    p_meta,
    p_words,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    batch,
    max_pages,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (rows, kv-head): the copy of the key that each row appended."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    inside = row < batch
    slot = tl.load(p_slots + row, inside, other=-1).to(tl.int64)
    token = tl.load(p_lengths + row, inside, other=0) - 1
    appended = tl.load(p_appended + row, inside, other=0)
    valid = (slot >= 0) & (token >= 0) & (appended != 0)
    page = tl.load(p_pages + slot * max_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    p_key = p_k + row * s_row + head * s_head
    pools = p_codes, p_meta, p_words
    _write(p_key, pools, at, valid, D, PAIRS, BLOCK_T, WIDE, LOG_WIDE)
