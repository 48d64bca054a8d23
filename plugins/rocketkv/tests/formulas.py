"""Both stages in float64, in loops, apart from the plugin's code."""

from __future__ import annotations

import math

import torch


def votes(q, k, scale, first):
    """Votes that the queries of positions ``first ..`` give to all positions: a list of floats.

    ``q [c, G, D]`` are the query heads of one lane, ``k [n, G, D]`` the key that each looks at.
    """
    mass = torch.zeros(len(k), dtype=torch.float64)
    for row, heads in enumerate(q.double()):
        seen = k[: first + row + 1].double()
        logits = torch.einsum("gd,ngd->gn", heads, seen) * scale
        mass[: len(seen)] += logits.softmax(-1).sum(0)
    return mass.tolist()


def pooled(mass, kernel):
    """The largest around each position."""
    half = kernel // 2
    return [max(mass[max(i - half, 0) : i + half + 1]) for i in range(len(mass))]


def top(values, count):
    """Indices of the best values; of equal ones the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def channels(q, count):
    """Channels that are read for query heads ``[G, D]`` of one kv-head, ascending."""
    return sorted(top(q.double().abs().sum(0).tolist(), count))


def unscaled(q, units, count):
    """``sum_i q_gi b_i`` over the channels that are read; float64 ``[G, U]``.

    ``q [G, D]`` of one kv-head, ``units [U, unit, D]`` its keys.
    """
    q, units = q.double(), units.double()
    total = torch.zeros(len(q), len(units), dtype=torch.float64)
    for i in channels(q, count):
        keys = units[:, :, i]
        bound = keys.amax(1) if q[:, i].sum() > 0 else keys.amin(1)
        total += q[:, i, None] * bound
    return total


def scores(q, units, count):
    """``unscaled`` over the paper's ``tau_g = sqrt(D |q_g[read]|_1 / |q_g|_1)``."""
    total, size = unscaled(q, units, count), q.double().abs()
    for g, row in enumerate(size):
        part, whole = float(row[channels(q, count)].sum()), float(row.sum())
        total[g] /= math.sqrt(q.shape[1] * part / whole) if part else 1
    return total


def quest(q, units):
    """Quest's bound of each unit for queries ``[G, D]``; float64 ``[G, U]``."""
    q, units = q.double()[:, None], units.double()
    return torch.maximum(q * units.amin(1), q * units.amax(1)).sum(-1)
