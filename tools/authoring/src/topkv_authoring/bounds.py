"""Bounds of the keys of a unit, and bfloat16 numbers that are not below others.

Each device function stands behind its formula in torch and gives the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
from torch import Tensor

from topkv_authoring.language import jit, tl


def minmax(k: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Exact bounds of keys ``[n, unit, Hkv, D]`` where ``valid [n, unit]``; fp32 ``[n, Hkv, D]``.

    Keys in invalid places (NaN, say) have no influence. Adding zero turns -0.0 into +0.0: bounds
    depend on the values of the keys, not on their order.
    """
    valid = valid[..., None, None]
    low = torch.where(valid, k.float(), float("inf")).amin(1)
    high = torch.where(valid, k.float(), float("-inf")).amax(1)
    return low + 0.0, high + 0.0


@jit
def key_bounds(k, valid):
    """``minmax`` of the keys ``k [tokens, channels]`` of a unit; infinite in padded channels."""
    low = tl.min(tl.where(valid, k, float("inf")), 0) + 0.0
    return low, tl.max(tl.where(valid, k, float("-inf")), 0) + 0.0


def bf16_up(x: Tensor) -> Tensor:
    """fp32 ``x`` to the smallest bfloat16 value that is not below it, as fp32."""
    bits = x.contiguous().view(torch.int32)
    whole = bits & -65536
    return torch.where((bits > 0) & (whole != bits), whole + 65536, whole).view(torch.float32)


@jit
def raised(x):
    """``bf16_up`` of fp32 ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    whole = bits & -65536
    bits = tl.where((bits > 0) & (whole != bits), whole + 65536, whole)
    return bits.to(tl.float32, bitcast=True)
