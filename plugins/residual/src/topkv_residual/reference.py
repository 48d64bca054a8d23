"""The estimate in plain torch: the formulas that the kernels are held to.

Shapes: n or U units, Hkv kv-heads, H query heads, D head dim, N rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def summary(k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean key and mean value, fp32 ``[n, Hkv, D]``.

    Args:
        k, v: ``[n, unit, Hkv, D]``.
        valid: bool ``[n, unit]``; rows in invalid places (NaN, say) have no influence.
    """
    there = valid[..., None, None]
    keys, values = (torch.where(there, x.float(), 0.0).sum(1) / there.sum(1) for x in (k, v))
    return keys, values


def logits(q: Tensor, mean: Tensor, unit: int, scale: float) -> Tensor:
    """Logarithm of the weight of the tokens of each unit together, fp32 ``[N, H, U]``.

    Over the tokens of a unit, ``log sum e^s = log u + log mean e^s``, of which the last is at
    least the mean of the logits s, ``scale q.mean`` (Jensen): that stands for it.

    Args:
        q: ``[N, H, D]``.
        mean: ``[N, U, Hkv, D]``.
        unit: u.
    """
    q = q.float().unflatten(1, (mean.shape[2], -1))
    found = torch.einsum("nhgd,nuhd->nhgu", q, mean.float()) * scale
    return found.flatten(1, 2) + math.log(unit)


def add(
    out: Tensor, lse: Tensor, weights: Tensor, values: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """``out [N, H, D]`` and ``lse [N, H]`` with the units that were left out added, in fp32.

    Args:
        weights: fp32 ``[N, H, U]`` logarithms, see ``logits``.
        values: ``[N, U, Hkv, D]`` mean values.
        left: bool ``[N, H, U]`` which units were left out.
    """
    group = weights.shape[1] // values.shape[2]
    weights = weights.masked_fill(~left, -torch.inf)
    total = torch.logaddexp(lse, weights.logsumexp(-1))
    shares = (weights - total[..., None]).exp().unflatten(1, (-1, group))
    known = torch.where(left.any(1)[..., None, None], values.float(), 0.0)
    part = torch.einsum("nhgu,nuhd->nhgd", shares, known).flatten(1, 2)
    added = (lse - total).exp()[..., None] * out.float() + part
    some = left.any(-1)
    return torch.where(some[..., None], added, out.float()), torch.where(some, total, lse)
