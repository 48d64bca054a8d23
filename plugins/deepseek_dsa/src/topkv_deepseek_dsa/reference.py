"""The lightning indexer in plain torch: the formulas that the kernels are held to.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, section 2.
Shapes: m rows of queries, n tokens, H index heads, D index head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Tokens whose fp8 keys are stored together, their scales behind them."""

LARGEST = 448.0
"""Largest e4m3fn."""

LEAST = 1e-4
"""Least maximum that a scale is made of."""


def hadamard(x: Tensor) -> Tensor:
    """``H_D x * D ** -0.5`` over the last dimension, D a power of two; fp32.

    Each stage adds and subtracts neighbours and moves the sums in front of the differences: after
    log2 D stages every element is back at its place, in the order of Sylvester's matrix.
    """
    x, dim = x.float(), x.shape[-1]
    for _ in range(dim.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat([even + odd, even - odd], dim=-1)
    return x * float(dim**-0.5)


def quantize(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 ``[..., D]``, and scales, fp32 ``[...]``, of rows ``x [..., D]``.

    ``s = max(amax |x|, 1e-4) / 448``, rounded up to a power of two on request; a code is
    ``e4m3(clamp(x / s, -448, 448))``, rounded to nearest, ties to even.
    """
    x = x.float()
    most = x.abs().amax(-1).clamp(min=LEAST)
    # By a tensor: torch multiplies with the reciprocal of a number, which rounds otherwise.
    scale = most / torch.full_like(most, LARGEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (x / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def decode(codes: Tensor) -> Tensor:
    """The values of e4m3fn codes, fp32; scales are left out."""
    return codes.view(torch.float8_e4m3fn).float()


def blocks(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an fp8 pool ``[rows, D + 4]`` uint8: codes and scales.

    A block of 64 rows holds 64 * D bytes of codes, token after token, and 64 fp32 scales.

    Returns:
        uint8 ``[rows / 64, 64, D]`` and fp32 ``[rows / 64, 64]``.
    """
    width = pool.shape[1]
    held = pool.view(-1, BLOCK * width)
    codes, scales = held.split([BLOCK * (width - 4), BLOCK * 4], dim=1)
    return codes.unflatten(1, (BLOCK, width - 4)), scales.view(torch.float32)


def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``sum over j of w[m, j] * relu(q[m, j] . k[n])``, fp32 ``[m, n]``.

    Summed in float64: in fp32 the order of the sum differs from column to column, and equal keys
    would get scores that are not.

    Args:
        q: fp32 ``[m, H, D]``.
        k: fp32 ``[n, D]``, or ``[m, n, D]`` where every row has tokens of its own.
        weights: fp32 ``[m, H]``, of either sign, with all scale factors.
    """
    products = torch.matmul(q.double(), k.double().mT).relu()
    return (products * weights.double()[..., None]).sum(-2).float()
