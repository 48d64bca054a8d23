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
def write_labels(p_key, tensors, at, slot, head, valid, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.gather``, ``narrowed`` and ``quantize`` of keys. ``OPTIONS``: channels, and
    elements of a label; whether labels are 4 bit, and keys bits of bfloat16; elements of channels
    and of ranges of a request."""
    R: tl.constexpr = OPTIONS[0]
    WIDTH: tl.constexpr = OPTIONS[1]
    INT4: tl.constexpr = OPTIONS[2]
    KEY_BF16: tl.constexpr = OPTIONS[3]
    BLOCK_W: tl.constexpr = OPTIONS[4]
    p_labels, p_meta, p_channels, p_ranges = tensors
    p_channels += slot * OPTIONS[5] + head * R
    p_ranges += slot * OPTIONS[6] + head * (2 * R)
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
