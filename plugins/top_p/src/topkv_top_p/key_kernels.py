"""4-bit copies of keys in Triton, beside ``reference.encode``.

Launched without fused multiply-adds: the same bits as those of the reference. Names: ``p_``
pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bf16_up(x):
    """The bits of fp32 ``x``, raised to the next bfloat16: the low half is 0."""
    bits = x.to(tl.int32, bitcast=True)
    whole = bits & -0x10000
    return tl.where((bits > 0) & (whole != bits), whole + 0x10000, whole)


@triton.jit
def _codes(x, zero, scale):
    step = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(x)
    codes = tl.floor(tl.div_rn(x - zero[:, None], step) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)


@triton.jit
def _write(
    p_key, p_codes, p_meta, at, valid, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Copies of the keys ``p_key [n]`` to rows ``at [n]`` of the pools, where ``valid [n]``."""
    j = tl.arange(0, BLOCK_W)
    in_low = valid[:, None] & (j < WIDTH)[None, :]
    in_high = valid[:, None] & (j < D - WIDTH)[None, :]
    low = tl.load(p_key[:, None] + j[None, :], in_low, other=0).to(tl.float32) + 0.0
    high = tl.load(p_key[:, None] + WIDTH + j[None, :], in_high, other=0).to(tl.float32) + 0.0
    least = tl.min(tl.where(in_low, low, float("inf")), 1)
    least = tl.minimum(least, tl.min(tl.where(in_high, high, float("inf")), 1))
    most = tl.max(tl.where(in_low, low, float("-inf")), 1)
    most = tl.maximum(most, tl.max(tl.where(in_high, high, float("-inf")), 1))
    zero = -_bf16_up(-tl.where(valid, least, 0.0)).to(tl.float32, bitcast=True) + 0.0
    span = tl.where(valid, most, 0.0) - zero
    raised = _bf16_up(tl.div_rn(span, 15.0 + tl.zeros_like(span)))
    scale = raised.to(tl.float32, bitcast=True)
    codes = _codes(low, zero, scale) | tl.where(in_high, _codes(high, zero, scale), 0) << 4
    tl.store(p_codes + at[:, None] * WIDTH + j[None, :], codes.to(tl.uint8), in_low)
    tl.store(p_meta + at * 2, (raised >> 16).to(tl.int16), valid)
    tl.store(p_meta + at * 2 + 1, (zero.to(tl.int32, bitcast=True) >> 16).to(tl.int16), valid)


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_codes,
    p_meta,
    p_pages,
    start,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
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
    _write(p_key, p_codes, p_meta, at, valid, D, WIDTH, BLOCK_W)


@triton.jit(do_not_specialize=["batch"])
def update_kernel(
    p_k,
    p_codes,
    p_meta,
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
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
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
    _write(p_key, p_codes, p_meta, at, valid, D, WIDTH, BLOCK_W)
