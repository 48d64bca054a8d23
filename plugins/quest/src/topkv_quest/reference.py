"""Quest in plain torch: the formulas that the kernels are held to.

Shapes: n tokens or units in front, Hkv kv-heads, D head dim, U = ``max_units``. Bounds are
``[..., Hkv, 2, D]``, [0] the minimum and [1] the maximum of the keys of a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 1 << 16
"""One unit in the last place of bfloat16, in the bits of float32."""


def bf16_up(x: Tensor) -> Tensor:
    """fp32 ``x`` to the smallest bfloat16 value that is not below it, as fp32."""
    bits = x.contiguous().view(torch.int32)
    whole = bits & -STEP
    return torch.where((bits > 0) & (whole != bits), whole + STEP, whole).view(torch.float32)


def bf16_scale(amax: Tensor) -> Tensor:
    """The smallest bfloat16 s with ``127 * s >= amax >= 0``, as fp32.

    Times an integer below 2**16 it is exact in fp32, so the comparisons here and in ``steps``
    are, and the result does not depend on how a device rounds its divisions.
    """
    first = bf16_up(amax / 127)
    bits = first.view(torch.int32)
    above, below = ((bits + step).view(torch.float32) for step in (STEP, -STEP))
    scale = torch.where(127 * first >= amax, first, above)
    return torch.where((bits > 0) & (127 * below >= amax), below, scale)


def steps(x: Tensor, scale: Tensor) -> Tensor:
    """The smallest integer n with ``n * scale >= x``, as fp32; 0 where the scale is 0."""
    n = (x / torch.where(scale > 0, scale, 1.0)).ceil()
    n = torch.where(n * scale < x, n + 1, n)
    return torch.where((n - 1) * scale >= x, n - 1, n) * (scale > 0)


def encode(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Metadata of units from the exact minima and maxima of their keys.

    Args:
        low, high: fp32 ``[..., D]``.
        dtype: of the metadata; what it cannot hold is rounded outward.

    Returns:
        bounds ``[..., 2, D]`` of ``dtype``, and for int8 the scale, bfloat16 ``[...]``.
    """
    if dtype is torch.int8:
        scale = bf16_scale(torch.maximum(low.abs(), high.abs()).amax(-1))
        bounds = torch.stack(
            [-steps(-low, scale[..., None]), steps(high, scale[..., None])], dim=-2
        )
        return bounds.to(dtype), scale.to(torch.bfloat16)
    if dtype is torch.bfloat16:
        low, high = -bf16_up(-low), bf16_up(high)
    return torch.stack([low, high], dim=-2).to(dtype), None


def minmax(k: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Exact bounds of keys ``[n, unit, Hkv, D]`` where ``valid [n, unit]``; fp32 ``[n, Hkv, D]``.

    What lies in invalid places (NaN, say) has no influence. Adding zero turns -0.0 into +0.0:
    bounds depend on the values of the keys, not on their order.
    """
    valid = valid[..., None, None]
    low = torch.where(valid, k.float(), float("inf")).amin(1)
    high = torch.where(valid, k.float(), float("-inf")).amax(1)
    return low + 0.0, high + 0.0


def head_scores(q: Tensor, bounds: Tensor, scale: Tensor | None) -> Tensor:
    """``sum_i max(q_i m_i, q_i M_i)`` per query head, fp32 ``[n, H, U]``.

    Args:
        q: ``[n, H, D]``.
        bounds: ``[n, U, Hkv, 2, D]``.
        scale: ``[n, U, Hkv]`` or None.
    """
    rows, heads, dim = q.shape
    kv_heads = bounds.shape[2]
    q = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    low, high = bounds.float().unbind(3)
    scores = torch.einsum("nhgd,nuhd->nhgu", q.clamp(min=0), high)
    scores += torch.einsum("nhgd,nuhd->nhgu", q.clamp(max=0), low)
    if scale is not None:
        scores *= scale.float().permute(0, 2, 1)[:, :, None]
    return scores.flatten(1, 2)
