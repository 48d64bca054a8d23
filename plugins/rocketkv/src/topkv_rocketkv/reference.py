"""Both stages in plain torch: what a prompt keeps, and the formulas that the kernels are held to.

Shapes: B rows, H query heads of Hkv kv-heads, G of each, D head dim, U units. Bounds are
``[..., Hkv, 2, D]``, [0] the minimum and [1] the maximum of the keys of a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv_authoring import bounds

DROPPED = -1e30
"""Score of a unit that the first stage dropped: below every other, and finite, so that a block of
nothing else has a maximum."""


def by_page(pool: Tensor, per_page: int) -> Tensor:
    """Bounds as they are packed, seen as ``[pages, units of a page, Hkv, 2, D]``.

    In memory a page is ``[Hkv, 2, D, units]``: one channel of all its units is in one run, so that
    channels which a step does not ask for are not read.
    """
    heads, two, dim = pool.shape[1:]
    return pool.view(-1, heads, two, dim, per_page).permute(0, 4, 1, 2, 3)


def minmax(k: Tensor, valid: Tensor) -> Tensor:
    """Bounds ``[n, Hkv, 2, D]`` of keys ``[n, unit, Hkv, D]`` where ``valid [n, unit]``; exact."""
    return torch.stack(bounds.minmax(k, valid), 2).to(k.dtype)


def best_channels(q: Tensor, count: Tensor) -> Tensor:
    """bool ``[B, Hkv, D]``: the ``count [B]`` channels of the largest ``sum_g |q_g|``.

    Of equal ones the lower channel wins. ``q`` is ``[B, Hkv, G, D]`` fp32.
    """
    order = q.abs().sum(2).sort(dim=-1, descending=True, stable=True).indices
    return order.argsort(-1) < count[:, None, None]


def temperatures(q: Tensor, chosen: Tensor) -> Tensor:
    """SparQ's ``sqrt(|q_g|_1 / |q_g[chosen]|_1)``, ``[B, Hkv, G]``; 1 where it is 0 / 0.

    Logits over few channels are too small by about that; times the logit scale of the model
    it is one over the paper's ``tau_g``.
    """
    size = q.abs()
    part = torch.where(chosen[:, :, None], size, 0.0).sum(-1)
    return torch.where(part > 0, size.sum(-1) / torch.where(part > 0, part, 1.0), 1.0).sqrt()


def head_scores(q: Tensor, bounds: Tensor, count: Tensor) -> Tensor:
    """Scores of units for each query head, before the logit scale; fp32 ``[B, H, U]``.

    The query head g of a kv-head scores a unit by ``sum_i q_gi b_i`` over the chosen channels,
    times its temperature. ``b_i`` is the maximum where the group's summed query is positive, and
    the minimum elsewhere.

    Args:
        q: ``[B, H, D]``.
        bounds: ``[B, U, Hkv, 2, D]``.
        count: ``[B]`` channels that are read.
    """
    q = q.float().unflatten(1, (bounds.shape[2], -1))
    chosen = best_channels(q, count)
    low, high = bounds.float().unbind(3)
    bound = torch.where(q.sum(2)[:, None] > 0, high, low)
    bound = torch.where(chosen[:, None], bound, 0.0)
    scores = torch.einsum("bhgd,buhd->bhgu", q, bound)
    return (scores * temperatures(q, chosen)[..., None]).flatten(1, 2)


def best(scores: Tensor, count: int) -> Tensor:
    """bool ``[N, n]``: the ``count`` best scores of each row; of equal ones the lower position."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def units_of(tokens: Tensor, unit: int) -> Tensor:
    """bool ``[N, units]``: those that hold one of ``tokens``, bool ``[N, n]``."""
    padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % unit))
    return padded.unflatten(1, (-1, unit)).any(-1)
