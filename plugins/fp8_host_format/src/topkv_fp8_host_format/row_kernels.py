"""Rows of ``topkv_fp8_host_format.rows`` in Triton, bit for bit."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topkv_authoring.latent_fp8_kernels import e4m3_bits
from topkv_fp8_host_format import rows

PAIRS = tl.constexpr(rows.FINE_PAIRS)
MOST_ELEMENTS = tl.constexpr(rows.MOST_ELEMENTS)
FP16_LEAST, FP16_MOST = map(tl.constexpr, rows.EXPONENTS[torch.float16])
LEAST_EXPONENT, MOST_EXPONENT = map(tl.constexpr, rows.EXPONENTS[torch.bfloat16])

ROWS = 4
"""Rows of a program."""


@triton.jit
def _words(magnitude, steps, D: tl.constexpr):
    """The words of the pairs that have the largest codes, int64 ``[rows]``, of codes without
    their signs and of steps, int32 ``[rows, BLOCK]``."""
    HALF: tl.constexpr = (D + 1) // 2
    d = tl.arange(0, magnitude.shape[1])[None, :]
    pair = tl.where(d < HALF, d, d - HALF)
    left = tl.where(d < D, magnitude, -1)
    nibble = (steps & 15) << tl.where(d < HALF, 8, 12)
    words = tl.zeros([magnitude.shape[0]], tl.int64)
    for nth in tl.static_range(PAIRS):
        top = tl.max(left, 1)
        which = tl.min(tl.where(left == top[:, None], pair, MOST_ELEMENTS), 1)
        own = (pair == which[:, None]) & (d < D)
        word = which | tl.sum(tl.where(own, nibble, 0), 1)
        words |= tl.where(top >= 0, word, 0).to(tl.int64) << (16 * nth)
        left = tl.where(own, -1, left)
    return words


@triton.jit
def encode_rows(x, D: tl.constexpr):
    """Codes uint8 ``[rows, BLOCK]``, words int64 ``[rows]`` and exponents uint8 ``[rows]`` of
    ``[rows, BLOCK]`` in the model's dtype, 0 from D on."""
    HALF_PRECISION: tl.constexpr = tl.float16 == x.dtype
    LEAST: tl.constexpr = FP16_LEAST if HALF_PRECISION else LEAST_EXPONENT
    MOST: tl.constexpr = FP16_MOST if HALF_PRECISION else MOST_EXPONENT
    x = x.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    amax = tl.max(tl.where(finite, bits, 0), 1)  # bits of floats are ordered as they are
    # 448 = 1.75 * 2 ** 8: all above 1.75 times a power carries into its exponent.
    exponent = ((amax + 0x1FFFFF) >> 23) - 135
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    largest = tl.where(exponent == MOST, 240.0, 448.0)[:, None]
    scaled = tl.where(finite, x, 0.0) * inverse[:, None]
    code = tl.minimum(tl.maximum(scaled, -largest), largest)
    codes = tl.where(finite, e4m3_bits(code), 0x7F).to(tl.uint8)
    magnitude = (codes & 0x7F).to(tl.int32)
    off = tl.abs(scaled).to(tl.int32, bitcast=True) - ((magnitude << 20) + (120 << 23))
    steps = tl.minimum(tl.maximum((off + 0x8000) >> 16, -7), 7)
    # Where a step is below what the dtype has, there are none.
    none = (magnitude >> 3) - 7 + exponent[:, None] < LEAST + 2
    steps = tl.where((magnitude < 8) | (magnitude == 0x7F) | none, 0, steps)
    return codes, _words(magnitude, steps, D), (exponent + 127).to(tl.uint8)


@triton.jit
def decode_rows(codes, words, exponents, d, DTYPE: tl.constexpr, D: tl.constexpr):
    """``DTYPE[rows, BLOCK]`` of codes uint8 of elements ``d`` of their rows, and of words int64
    and exponents uint8 that broadcast to them."""
    HALF: tl.constexpr = (D + 1) // 2
    pair, shift = tl.where(d < HALF, d, d - HALF), tl.where(d < HALF, 20, 16)
    magnitude = (codes & 0x7F).to(tl.int32)
    normal = (magnitude << 20) + (120 << 23)
    for nth in tl.static_range(PAIRS):
        word = (words >> (16 * nth)).to(tl.int32)
        # Its four bits, with their sign, as steps of the eighth significant bit.
        steps = ((word << shift) >> 28) << 16
        normal += tl.where((word & 255) == pair, steps, 0)
    normal = normal.to(tl.float32, bitcast=True)
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
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = first + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (row < count)[:, None] & (d < D)
    at = (row // HEADS) * s_row + (row % HEADS) * s_head
    x = tl.load(p_in + at[:, None] + d, live, other=0.0)
    codes, words, exponents = encode_rows(x, D)
    dtype: tl.constexpr = p_out.dtype.element_ty
    y = decode_rows(codes, words[:, None], exponents[:, None], d, dtype, D)
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
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (blocks of rows, keys and values). Strides in elements; outputs are contiguous."""
    if tl.program_id(1) == 0:
        _round(p_k, p_k_out, count, s_k, s_k_head, HEADS, D, BLOCK, BLOCK_D)
    else:
        _round(p_v, p_v_out, count, s_v, s_v_head, HEADS, D, BLOCK, BLOCK_D)


def round_rows(k: Tensor, v: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """Round keys and values ``[n, Hkv, D]``, last dimension contiguous, to contiguous ones."""
    count = k.shape[0] * k.shape[1]
    if not count:
        return
    round_kernel[(triton.cdiv(count, ROWS), 2)](
        *(k, v, k_out, v_out, count),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        HEADS=k.shape[1],
        D=k.shape[2],
        BLOCK=ROWS,
        BLOCK_D=triton.next_power_of_2(k.shape[2]),
        num_warps=4,
    )
