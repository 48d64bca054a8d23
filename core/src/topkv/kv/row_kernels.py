"""Rows of ``topkv.kv.host_format`` in Triton: bit for bit the same."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv.kv.fp8_kernels import e4m3_bits

ROWS = 4
"""Rows of a program."""


@triton.jit
def encode_rows(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Codes uint8 ``[rows, D]`` and exponents uint8 ``[rows]`` of fp32 ``[rows, D]``."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    amax = tl.max(tl.where(finite, bits, 0), 1)  # bits of floats are ordered as they are
    # 448 = 1.75 * 2 ** 8: what lies above 1.75 times a power carries into its exponent.
    exponent = ((amax + 0x1FFFFF) >> 23) - 135
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    largest = tl.where(exponent == MOST, 240.0, 448.0)[:, None]
    code = tl.where(finite, x, 0.0) * inverse[:, None]
    code = tl.minimum(tl.maximum(code, -largest), largest)
    codes = tl.where(finite, e4m3_bits(code), 0x7F).to(tl.uint8)
    return codes, (exponent + 127).to(tl.uint8)


@triton.jit
def decode_rows(codes, exponents, DTYPE: tl.constexpr):
    """``DTYPE[...]`` of codes uint8 and exponents uint8 that broadcast to them."""
    magnitude = (codes & 0x7F).to(tl.int32)
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True) | ((codes & 0x80).to(tl.int32) << 24)
    scale = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    # NaN of one kind: what a cast makes of it differs from device to device.
    value = tl.where(magnitude == 0x7F, 0.0, bits.to(tl.float32, bitcast=True)) * scale
    nan = (magnitude == 0x7F) | (value != value)
    if tl.float32 == DTYPE:
        kept = tl.where(nan, 0x7FC00000, value.to(tl.int32, bitcast=True))
    else:
        kept = value.to(DTYPE).to(tl.int16, bitcast=True)
        kept = tl.where(nan, 0x7FC0 if tl.bfloat16 == DTYPE else 0x7E00, kept).to(tl.int16)
    return kept.to(DTYPE, bitcast=True)


@triton.jit
def _round(
    p_in,
    p_out,
    count,
    s_row,
    s_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = first + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (row < count)[:, None] & (d < D)
    at = (row // HEADS) * s_row + (row % HEADS) * s_head
    x = tl.load(p_in + at[:, None] + d, live, other=0.0).to(tl.float32)
    codes, exponents = encode_rows(x, LEAST, MOST)
    y = decode_rows(codes, exponents[:, None], p_out.dtype.element_ty)
    tl.store(p_out + row[:, None] * D + d, y, live)


@triton.jit(do_not_specialize=["count"])
def round_kernel(
    p_k,
    p_v,
    p_k_out,
    p_v_out,
    count,
    s_k,
    s_k_head,
    s_v,
    s_v_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (blocks of rows, keys and values). Strides in elements; outputs are contiguous."""
    if tl.program_id(1) == 0:
        _round(p_k, p_k_out, count, s_k, s_k_head, HEADS, D, LEAST, MOST, BLOCK, BLOCK_D)
    else:
        _round(p_v, p_v_out, count, s_v, s_v_head, HEADS, D, LEAST, MOST, BLOCK, BLOCK_D)


def round_rows(
    k: Tensor, v: Tensor, k_out: Tensor, v_out: Tensor, exponents: tuple[int, int]
) -> None:
    """Keys and values ``[n, Hkv, D]``, last dimension contiguous, to contiguous rounded ones.

    Args:
        exponents: least and largest power of a scale.
    """
    count = k.shape[0] * k.shape[1]
    if not count:
        return
    round_kernel[(triton.cdiv(count, ROWS), 2)](
        *(k, v, k_out, v_out, count),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        HEADS=k.shape[1],
        D=k.shape[2],
        LEAST=exponents[0],
        MOST=exponents[1],
        BLOCK=ROWS,
        BLOCK_D=triton.next_power_of_2(k.shape[2]),
        num_warps=4,
    )
