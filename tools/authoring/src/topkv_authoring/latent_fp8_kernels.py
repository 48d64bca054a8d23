"""Packing latent rows in Triton, beside ``latent_fp8.encode_fp8``: byte for byte the same."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""Rows of a program."""


@triton.jit
def e4m3_bits(x):
    """Bits of fp32 ``|x| <= 448`` as e4m3fn, rounded to nearest even.

    Integer arithmetic where the result is normal; below, adding 1.5 * 2 ** 23 rounds to whole
    multiples of the least subnormal, 2 ** -9.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    shifted = bits.to(tl.float32, bitcast=True) * 512.0 + 12582912.0
    subnormal = shifted.to(tl.uint32, bitcast=True) & 0xFF
    return (sign | tl.where(bits < 0x3C800000, subnormal, normal)).to(tl.uint8)


@triton.jit
def power_above(x):
    """The least power of two that is not below normal fp32 ``x > 0``."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def encode_kernel(
    p_rows,
    p_out,
    count,
    s_row,
    s_out,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Grid (blocks of rows, tiles of latents). The first tile's programs copy the rope elements.

    ``p_rows`` may be of any float dtype, ``p_out`` is uint8. Strides in elements.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.program_id(1)
    live = (row < count)[:, None]
    j = tile * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(p_rows + row[:, None] * s_row + j, live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 1)
    scale = power_above(tl.maximum(tl.div_rn(amax, amax * 0 + 448.0), 1e-4))
    # A plain division may be approximate on a GPU.
    code = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    code = tl.minimum(tl.maximum(code, -448.0), 448.0)
    p_row = p_out + row[:, None] * s_out
    tl.store(p_row + j, e4m3_bits(code), live)
    byte = tl.arange(0, 4)[None, :]
    scale_bytes = (scale.to(tl.uint32, bitcast=True)[:, None] >> (8 * byte).to(tl.uint32)) & 0xFF
    tl.store(p_row + LATENT + tile * 4 + byte, scale_bytes.to(tl.uint8), live)
    if tile == 0:
        r = tl.arange(0, ROPE)[None, :]
        rope = tl.load(p_rows + row[:, None] * s_row + LATENT + r, live, other=0.0)
        bits = _bfloat16_bits(rope.to(tl.float32))
        p_rope = p_row + LATENT + LATENT // TILE * 4 + 2 * r
        tl.store(p_rope, (bits & 0xFF).to(tl.uint8), live)
        tl.store(p_rope + 1, (bits >> 8).to(tl.uint8), live)


@triton.jit
def _bfloat16_bits(x):
    """Bits of fp32 as bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)


def encode_fp8(rows: Tensor, out: Tensor, latent: int, tile: int, rope: int) -> None:
    """Pack rows ``[n, 1, latent + rope]`` to uint8 ``[n, 1, bytes]``, last dims contiguous."""
    grid = (triton.cdiv(rows.shape[0], ROWS), latent // tile)
    encode_kernel[grid](
        *(rows, out, rows.shape[0], rows.stride(0), out.stride(0)),
        BLOCK=ROWS,
        LATENT=latent,
        TILE=tile,
        ROPE=rope,
        num_warps=4,
    )
