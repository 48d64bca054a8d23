"""TriAttention in plain torch: the formulas, and what the kernels are held to.

Shapes: n units, H query heads, Hkv kv-heads, D head dim, P pages, L lanes. RoPE turns D / 2 pairs
of channels: pair f of a vector is the complex number ``x[first_f] + i x[second_f]``, and position
p multiplies it by ``exp(i omega_f p)``. Channels that it leaves alone are pairs with omega 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

DISTANCES = 2.0 ** torch.arange(17, dtype=torch.float64)
"""How far behind the next token the queries lie over which scores are averaged: 1 to 2^16."""


def summary(k: Tensor, valid: Tensor, pairs: Tensor) -> Tensor:
    """What is kept of each unit, fp32 ``[n, Hkv, D + D / 2]``: the mean of its keys, and behind it
    the mean size ``|k_f|`` of each of their pairs, at most the largest number of their dtype.

    Args:
        k: ``[n, unit, Hkv, D]`` post-RoPE keys.
        valid: bool ``[n, unit]``; what lies in invalid places (NaN, say) has no influence.
        pairs: int ``[2, D / 2]`` the first and second channels of pairs.
    """
    keys = torch.where(valid[..., None, None], k.float(), 0.0)
    sizes = torch.hypot(keys[..., pairs[0]], keys[..., pairs[1]])
    mean = torch.cat([keys, sizes], -1).sum(1) / valid.sum(1)[:, None, None]
    return mean.clamp(max=torch.finfo(k.dtype).max)


def weights(q: Tensor, size: Tensor, omega: Tensor, pairs: Tensor, position: int) -> Tensor:
    """By what the numbers of a summary are multiplied, fp64 ``[H, D + D / 2]``.

    With the mean query ``q_f`` and the mean size ``E|q_f|`` a pre-RoPE key k at position p has ::

        mean_d sum_f |q_f||k_f| cos(omega_f (t - p + d) + arg(q_f conj(k_f)))
            + sum_f (E|q_f| - |q_f|) |k_f|

    The first line is the product of the post-RoPE key and the mean query as it is turned at
    ``t + d``, and linear in that key; the second is linear in the sizes of its pairs.

    Args:
        q: complex128 ``[H, D / 2]`` mean of pre-RoPE queries.
        size: fp64 ``[H, D / 2]`` mean size of their pairs.
        omega: fp64 ``[D / 2]`` radians a token.
        pairs: int ``[2, D / 2]``.
        position: t, of the next token.
    """
    angles = omega * (position + DISTANCES.to(omega.device))[:, None]
    turned = q * torch.polar(torch.ones_like(angles), angles).mean(0)
    found = torch.empty(len(q), 3 * len(omega), dtype=torch.float64, device=q.device)
    found[:, pairs[0]], found[:, pairs[1]] = turned.real, turned.imag
    found[:, 2 * len(omega) :] = size - q.abs()
    return found


def worth(pages: Tensor, by: Tensor, lanes: int) -> Tensor:
    """What pages are worth, fp64 ``[L, P]``: the mean over the query heads of a lane of how many
    deviations the mean score of a page lies above that of all.

    Args:
        pages: ``[P, Hkv, D + D / 2]`` summaries of pages.
        by: fp64 ``[H, D + D / 2]`` weights.
        lanes: L.
    """
    of_heads = by.unflatten(0, (pages.shape[1], -1))
    scores = torch.einsum("pkc,kgc->kgp", pages.double(), of_heads)
    apart = scores - scores.mean(-1, keepdim=True)
    scale = apart.square().mean(-1, keepdim=True).sqrt()
    return (
        torch.where(scale > 0, apart / scale, 0.0).flatten(0, 1).unflatten(0, (lanes, -1)).mean(1)
    )
