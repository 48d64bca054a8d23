"""Calibrations that no model made, for tests, and what they say of pages."""

from __future__ import annotations

import math

import torch

from topkv_triattention.calibration import LayerQueries


def pairs_of(dim, turned, halves):
    """Pairs of channels of which the first ``turned`` are turned: in halves, or neighbours."""
    step = turned // 2
    first = [(i, i + step) if halves else (2 * i, 2 * i + 1) for i in range(step)]
    return [[*pair] for pair in first] + [[i, i + 1] for i in range(turned, dim, 2)]


def made(seed, heads, dim, turned, halves):
    """Random mean queries of ``heads`` query heads."""
    draw = torch.Generator().manual_seed(seed)
    mean = torch.randn(heads, dim, generator=draw, dtype=torch.float64)
    pairs = torch.tensor(pairs_of(dim, turned, halves))
    apart = torch.rand(heads, dim // 2, generator=draw, dtype=torch.float64)
    size = torch.hypot(mean[:, pairs[:, 0]], mean[:, pairs[:, 1]]) * (1 + apart)
    omega = [10.0 ** (-4 * i / max(1, turned)) for i in range(turned // 2)]
    omega += [0.0] * (dim // 2 - len(omega))
    return LayerQueries(pairs.tolist(), omega, mean.tolist(), size.tolist())


def scored(known, head, key, position, t, factor):
    """The formula of the paper for one pre-RoPE key and query head, in float64: the score, and how
    large it might be."""
    score, size = 0.0, 0.0
    for f, (pair, omega) in enumerate(zip(known.pairs, known.frequencies, strict=True)):
        q = complex(*(known.mean[head][channel] for channel in pair))
        k = complex(*(float(key[channel]) for channel in pair))
        turned = 0.0
        for power in range(17):
            phase = q * k.conjugate()
            angle = omega * (t - position + 2**power) + math.atan2(phase.imag, phase.real)
            turned += math.cos(angle) / 17
        score += factor**2 * abs(q) * abs(k) * turned
        score += factor**2 * (known.size[head][f] - abs(q)) * abs(k)
        size += factor**2 * known.size[head][f] * abs(k)
    return score, size


def by_tokens(known, keys, positions, t, page, lanes, factor):
    """What pages of pre-RoPE keys ``[n, Hkv, D]`` are worth, a token at a time, and what rounding
    may do to it."""
    heads, pages = len(known.mean), len(keys) // page
    found, slack = torch.zeros(lanes, pages, dtype=torch.float64), 0.0
    for head in range(heads):
        of_head = keys[:, head * keys.shape[1] // heads]
        told = [
            scored(known, head, key, position, t, factor)
            for key, position in zip(of_head, positions, strict=True)
        ]
        scores, sizes = torch.tensor(told, dtype=torch.float64).unflatten(0, (-1, page)).mean(1).T
        apart = scores - scores.mean()
        deviation = apart.square().mean().sqrt()
        found[head * lanes // heads] += apart / deviation / (heads // lanes)
        slack = max(slack, float(sizes.max() / deviation))
    return found, slack
