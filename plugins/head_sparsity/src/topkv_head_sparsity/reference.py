"""Flatness of attention in plain torch: the formulas that the kernels are held to.

A *run* is up to ``RUN`` successive tokens of a unit. Letters: n units, R runs of a unit, Hkv
kv-heads, D head dim, N lanes, h query heads of a lane, P places: K' of candidates, then those of
the sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 4
"""Tokens of a run. Means of more hide a token that stands out; those of fewer take more bytes."""

SAMPLE = 64
"""Closed units at most that stand for those that are no candidates."""

LEVELS = 7
"""Codes reach from -7 to 7, and are stored as 1 to 15."""


def means(keys: Tensor, valid: Tensor) -> Tensor:
    """Mean keys of runs, fp32 ``[n, Hkv, R, D]``; 0 of a run without tokens.

    Args:
        keys: ``[n, unit, Hkv, D]``.
        valid: bool ``[n, unit]``; keys in invalid places (NaN, say) have no influence.
    """
    lacking = -keys.shape[1] % RUN
    there = torch.nn.functional.pad(valid, (0, lacking)).unflatten(1, (-1, RUN))
    padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, 0, 0, lacking))
    held = torch.where(there[..., None, None], padded.unflatten(1, (-1, RUN)), 0.0)
    first, *others = held.unbind(2)
    for each in others:  # one after another, as the kernels add
        first = first + each
    return (first / there.sum(2).clamp(min=1)[..., None, None]).transpose(1, 2)


def encode(mean: Tensor) -> tuple[Tensor, Tensor]:
    """4-bit codes of means ``[..., D]``: no channel is off by more than half a scale.

    Returns:
        uint8 ``[..., (D + 1) // 2]``: byte j holds channel j in its low and channel
        ``(D + 1) // 2 + j`` in its high four bits; and the scale, fp32 ``[...]``, a seventh of the
        largest channel.
    """
    scale = mean.abs().amax(-1) / LEVELS
    step = torch.where(scale > 0, scale, 1.0)[..., None]
    number = torch.floor(mean / step + 0.5).clamp(-LEVELS, LEVELS)
    codes = (number + LEVELS + 1).to(torch.uint8)
    half = (mean.shape[-1] + 1) // 2
    high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - mean.shape[-1]))
    return codes[..., :half] | high << 4, scale


def decode(codes: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Means as they are read, fp32 ``[..., dim]``."""
    number = torch.cat([codes & 15, codes >> 4], dim=-1)[..., :dim].float() - (LEVELS + 1)
    return number * scale[..., None]


def sample(closed: Tensor) -> tuple[Tensor, Tensor]:
    """Units ``[..., SAMPLE]`` spread evenly over ``closed [...]`` ones, all of them if they are no
    more, and which places have one, bool ``[..., SAMPLE]``."""
    nth = torch.arange(SAMPLE, device=closed.device)
    size = closed.clamp(max=SAMPLE)[..., None]
    units = (2 * nth + 1) * closed[..., None] // (2 * size).clamp(min=1)
    return units, nth < size


def weigh(worth: Tensor, offered: int, closed: Tensor) -> tuple[Tensor, Tensor]:
    """Return how flat attention is, and what it sums up to.

    A candidate stands for itself, and a unit of the sample for its share f of the closed units
    that are no candidates. With the weights w, 1 or f, attention to a unit is ``e^worth / Z``,
    ``Z = sum w e^worth``, and its entropy ``log Z - sum w worth e^worth / Z``. It is at most
    ``log closed``, where all units are worth the same. The flatness is their quotient.

    Args:
        worth: fp32 ``[N, h, P]``, -inf where there is no unit.
        offered: K', places of candidates.
        closed: ``[N]`` closed units, 2 or more where the flatness is to mean anything.

    Returns:
        fp32 ``[N]``, the least flatness of the query heads of a lane; and ``log Z``, ``[N, h]``.
    """
    there = worth[:, 0] > float("-inf")
    known, others = there[:, :offered].sum(1), there[:, offered:].sum(1)
    each = (closed - known).float() / others.clamp(min=1)
    weights = torch.ones_like(worth[:, 0])
    weights[:, offered:] = each[:, None]
    peak = worth.amax(-1, keepdim=True)
    below = torch.where(there[:, None], worth - peak, 0.0)
    mass = (weights * there)[:, None] * below.exp()
    whole = mass.sum(-1)
    entropy = whole.log() - (mass * below).sum(-1) / whole
    flatness = entropy / closed.clamp(min=2).float().log()[:, None]
    return flatness.amin(1), peak[..., 0] + whole.log()


def best(worth: Tensor, whole: Tensor, most: int) -> Tensor:
    """True for the candidates that rank first, bool ``[N, K']``, up to ``most`` of them.

    A candidate ranks by the largest share of a query head's attention that it has; of equal ones
    the lower unit comes first.

    Args:
        worth: fp32 ``[N, h, K']`` of candidates in ascending order, -inf where there is none.
        whole: ``log Z``, see ``weigh``.
    """
    share = (worth - whole[..., None]).amax(1)
    order = share.sort(dim=1, descending=True, stable=True).indices
    first = torch.arange(order.shape[1], device=order.device) < most
    chosen = torch.zeros_like(order, dtype=torch.bool)
    return chosen.scatter(1, order, first.expand_as(order)) & (worth[:, 0] > float("-inf"))
