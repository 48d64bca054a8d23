"""Labels in Triton, beside ``reference.gather``, ``narrowed`` and ``quantize``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
Labels that are kept as they are, and keys in bfloat16, are moved as integers of their width, which
keeps subnormals on every device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fp16_down(x):
    """fp32 to the largest fp16 that is not above it."""
    near = x.to(tl.float16)
    back = near.to(tl.float32)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    lower = tl.where(back > 0, bits - 1, tl.where(back < 0, bits + 1, -32767))
    return tl.where(back > x, lower, bits).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _scale(span):
    """The fp16 scale, as fp32, 15 of which cover ``span``."""
    scale = -_fp16_down(-tl.div_rn(span, 15.0 + tl.zeros_like(span))).to(tl.float32) + 0.0
    bits = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) + 1
    above = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(15.0 * scale < span, above, scale)


@triton.jit
def _codes(x, zero, scale):
    step = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(x)
    codes = tl.floor(tl.div_rn(x - zero[:, None], step) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)


@triton.jit
def _channel(p_key, p_channels, p_ranges, j, valid, KEY_BF16: tl.constexpr):
    """Channels ``j`` of the keys at ``p_key``, narrowed and saturated to fp16's range, fp32."""
    channel = tl.load(p_channels[:, None] + j[None, :], valid, other=0)
    p_range = p_ranges[:, None] + 2 * j[None, :]
    shift = tl.load(p_range, valid, other=0.0)
    divisor = tl.load(p_range + 1, valid, other=1.0)
    raw = tl.load(p_key[:, None] + channel, valid, other=0)
    if KEY_BF16:  # noqa: SIM108 - one of the two is compiled
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    x = tl.div_rn(x - shift, divisor)
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0) + 0.0


@triton.jit
def _write(
    p_key,
    p_channels,
    p_ranges,
    p_labels,
    p_meta,
    at,
    valid,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INT4: tl.constexpr,
    KEY_BF16: tl.constexpr,
):
    """Labels of the keys ``p_key [n]`` to rows ``at [n]``, where ``valid [n]``."""
    j = tl.arange(0, BLOCK_W)
    in_low = valid[:, None] & (j < WIDTH)[None, :]
    p_out = p_labels + at[:, None] * WIDTH + j[None, :]
    if INT4:
        in_high = valid[:, None] & (j < R - WIDTH)[None, :]
        low = _channel(p_key, p_channels, p_ranges, j, in_low, KEY_BF16)
        high = _channel(p_key, p_channels, p_ranges, j + WIDTH, in_high, KEY_BF16)
        least = tl.min(tl.where(in_low, low, float("inf")), 1)
        least = tl.minimum(least, tl.min(tl.where(in_high, high, float("inf")), 1))
        most = tl.max(tl.where(in_low, low, float("-inf")), 1)
        most = tl.maximum(most, tl.max(tl.where(in_high, high, float("-inf")), 1))
        zero = _fp16_down(tl.where(valid, least, 0.0))
        base = zero.to(tl.float32)
        scale = _scale(tl.where(valid, most, 0.0) - base)
        codes = _codes(low, base, scale)
        codes |= tl.where(in_high, _codes(high, base, scale), 0) << 4
        tl.store(p_out, codes.to(tl.uint8), in_low)
        tl.store(p_meta + at * 2, scale.to(tl.float16), valid)
        tl.store(p_meta + at * 2 + 1, zero, valid)
    else:
        channel = tl.load(p_channels[:, None] + j[None, :], in_low, other=0)
        raw = tl.load(p_key[:, None] + channel, in_low, other=0)
        tl.store(p_out, raw, in_low)


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_channels,
    p_ranges,
    p_labels,
    p_meta,
    p_pages,
    start,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INT4: tl.constexpr,
    KEY_BF16: tl.constexpr,
):
    """Program (tokens of the chunk, kv-head); channels, ranges and pages of the request."""
    nth = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    valid = nth < tokens
    token = start + nth
    page = tl.load(p_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    p_key = p_k + nth.to(tl.int64) * s_token + head * s_head
    mine = head * R + tl.zeros_like(at)
    _write(
        *(p_key, p_channels + mine, p_ranges + 2 * mine, p_labels, p_meta, at, valid),
        *(R, WIDTH, BLOCK_W, INT4, KEY_BF16),
    )


@triton.jit(do_not_specialize=["batch"])
def update_kernel(
    p_k,
    p_channels,
    p_ranges,
    p_labels,
    p_meta,
    p_pages,
    p_slots,
    p_lengths,
    p_appended,
    batch,
    max_pages,
    s_row,
    s_head,
    s_channels,
    s_ranges,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INT4: tl.constexpr,
    KEY_BF16: tl.constexpr,
):
    """Program (rows, kv-head): the label of the token that each row appended."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    inside = row < batch
    slot = tl.load(p_slots + row, inside, other=-1).to(tl.int64)
    token = tl.load(p_lengths + row, inside, other=0) - 1
    appended = tl.load(p_appended + row, inside, other=0)
    valid = (slot >= 0) & (token >= 0) & (appended != 0)
    page = tl.load(p_pages + slot * max_pages + token // PAGE, valid, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    p_key = p_k + row.to(tl.int64) * s_row + head * s_head
    p_mine = p_channels + slot * s_channels + head * R
    p_range = p_ranges + slot * s_ranges + head * (2 * R)
    _write(
        *(p_key, p_mine, p_range, p_labels, p_meta, at, valid),
        *(R, WIDTH, BLOCK_W, INT4, KEY_BF16),
    )
