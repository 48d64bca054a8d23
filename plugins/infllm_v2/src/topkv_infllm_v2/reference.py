"""Compressed keys in plain torch: the formulas that the kernels are held to.

A *part* is ``stride`` tokens, of which a unit has N; a *window* is two neighbouring parts, and
begins at each part. Shapes: D head dim, Hkv kv-heads, H query heads, U units, P = N U parts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad


def part_means(keys: Tensor, valid: Tensor, stride: int) -> Tensor:
    """fp32 ``[n, Hkv, N, D]``: the mean key of each part of n units.

    Args:
        keys: ``[n, unit, Hkv, D]``.
        valid: bool ``[n, unit]``. Keys that are not valid count as 0.
    """
    keys = torch.where(valid[..., None, None], keys.float(), 0.0)
    return keys.unflatten(1, (-1, stride)).sum(2).transpose(1, 2) / stride


def window_scores(q: Tensor, means: Tensor, parts: Tensor, scale: float) -> Tensor:
    """Scaled logits ``q . (mean of the keys of a window)``, fp32 ``[B, H, P]``.

    The last whole part begins a window of itself alone. Windows behind it are -inf.

    Args:
        q: ``[B, H, D]``.
        means: ``[B, P, Hkv, D]``, anything behind the whole parts.
        parts: int ``[B]``, how many are whole.
    """
    which = torch.arange(means.shape[1], device=q.device)
    means = torch.where((which < parts[:, None])[..., None, None], means.float(), 0.0)
    q = q.float().unflatten(1, (means.shape[2], -1))
    own = torch.einsum("bhgd,bphd->bhgp", q, means).flatten(1, 2)
    following = pad(own[..., 1:], (0, 1))
    alone = which == parts[:, None, None] - 1
    scores = torch.where(alone, own, (own + following) / 2) * scale
    return scores.masked_fill(which >= parts[:, None, None], float("-inf"))


def unit_scores(windows: Tensor, parts: int) -> Tensor:
    """``[B, L, U]``: the best of the windows ``[B, L, P]`` that a unit of N = ``parts`` shares a
    part with: those that begin in it, and the one that begins in the last part before it."""
    return max_pool1d(pad(windows, (1, 0), value=float("-inf")), parts + 1, stride=parts)
