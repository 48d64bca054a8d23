"""The estimate in plain torch: the formulas that the kernels are held to.

Shapes: n or U units, Hkv kv-heads, H query heads, D head dim, N rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def summary(k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean key, mean value, and deviation of the keys by channel, fp32 ``[n, Hkv, D]``.

    Args:
        k, v: ``[n, unit, Hkv, D]``.
        valid: bool ``[n, unit]``; rows in invalid places (NaN, say) have no influence.
    """
    there = valid[..., None, None]
    count = there.sum(1)
    keys, values = (torch.where(there, x.float(), 0.0) for x in (k, v))
    mean = keys.sum(1) / count
    apart = torch.where(there, keys - mean[:, None], 0.0)
    return mean, values.sum(1) / count, ((apart * apart).sum(1) / count).sqrt()


def logits(q: Tensor, mean: Tensor, deviation: Tensor | None, unit: int, scale: float) -> Tensor:
    """Logarithm of the weight of the tokens of each unit together, fp32 ``[N, H, U]``.

    Over the tokens of a unit, ``log sum e^s = log u + log mean e^s``. The logits s of a query have
    the mean ``m = scale q.mean`` and, channels taken as independent, the variance
    ``t = scale^2 sum_d q_d^2 deviation_d^2``. Were they normal, ``log mean e^s`` would be
    ``m + t / 2``. It is at least m (Jensen), and at most their maximum, which of u numbers is at
    most ``sqrt(t (u - 1))`` above the mean (Samuelson): so ``m + min(t / 2, sqrt(t (u - 1)))``.

    Args:
        q: ``[N, H, D]``.
        mean, deviation: ``[N, U, Hkv, D]``; without deviation t is 0.
        unit: u.
    """
    heads = mean.shape[2]
    q = q.float().unflatten(1, (heads, -1))
    found = torch.einsum("nhgd,nuhd->nhgu", q, mean.float()) * scale
    if deviation is not None:
        squares = deviation.float() ** 2
        spread = torch.einsum("nhgd,nuhd->nhgu", q * q, squares) * scale**2
        found = found + torch.minimum(spread / 2, (spread * (unit - 1)).sqrt())
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
