"""Number formats and the Hadamard transform in Triton, beside ``reference``.

Bits are made by integer arithmetic, the same on every device: the interpreter has no e4m3, and
rounds no bfloat16. bfloat16 is moved as 16-bit integers. ``p_`` are pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_fp32(p, mask, BF16: tl.constexpr):
    """Elements as fp32; bfloat16 ones come as integers."""
    raw = tl.load(p, mask, other=0)
    if BF16:  # noqa: SIM108 - one of the two is compiled
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def store_as(p, x, mask, BF16: tl.constexpr):
    """fp32 ``x``, rounded to nearest even, in the dtype of ``p``; bfloat16 as integers."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(p, bits.to(tl.int16), mask)
    else:
        tl.store(p, x.to(p.dtype.element_ty), mask)


@triton.jit
def encode_e4m3(x):
    """Codes, uint8, of fp32 ``x`` of at most 448 in magnitude, rounded to nearest even.

    Below 2 ** -6 codes count steps of 2 ** -9, which are the last bits of 2 ** 14 + |x|.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """Values, fp32, of uint8 codes; exact, subnormals included. NaN (0x7f, 0xff) reads as 480."""
    bits = code.to(tl.int32)
    small = (bits & 7).to(tl.float32) * 0.001953125
    normal = (((bits & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where((bits & 0x78) == 0, small, normal)
    return tl.where((bits & 0x80) != 0, -value, value)


@triton.jit
def scale_of(x, POWER_OF_TWO: tl.constexpr):
    """Scales ``[n]`` of rows ``x [n, D]``."""
    most = tl.maximum(tl.max(tl.abs(x), 1), 1e-4)
    scale = tl.div_rn(most, 448.0 + tl.zeros_like(most))
    if POWER_OF_TWO:
        # One below the next power of two carries into the exponent, unless it is one already.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def codes_of(x, scale):
    """Codes, uint8 ``[n, D]``."""
    y = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    return encode_e4m3(tl.minimum(tl.maximum(y, -448.0), 448.0))


@triton.jit
def hadamard(x, LEVELS: tl.constexpr, FACTOR: tl.constexpr):
    """``H x * FACTOR`` for rows ``x [n, 2 ** LEVELS]``, in the order of the reference's sums."""
    ROWS: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    for _ in tl.static_range(LEVELS):
        even, odd = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
        both = tl.join(even + odd, even - odd)
        x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, DIM])
    return x * FACTOR
