"""Calibrations that no model made, for tests."""

from __future__ import annotations

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
