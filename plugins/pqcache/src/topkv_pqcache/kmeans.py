"""k-means of sub-vectors: squared distance decides, the centroid is the mean of its members.

Shapes: g sets (kv-head and sub-vector), each clustered on its own, n vectors of d channels, C
centroids. fp32 throughout, no host sync, no shape that depends on the vectors, no random order of
sums: the same vectors give the same centroids.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 0xFFFFFFFF
"""Mask of 32 bits."""


def race(count: int, vectors: int, seed: int, device: torch.device) -> Tensor:
    """One over exponential variates, fp32 ``[count, vectors]``, of at most a million.

    ``argmax(weight * race[j])`` draws a vector by chances in proportion to weights. The numbers
    are a hash of seed, row and place (the finaliser of MurmurHash3), the same for any number of
    vectors.
    """
    x = torch.arange(vectors, device=device)
    x = x + torch.arange(count, device=device)[:, None] * 0x27D4EB2F + seed * 0x165667B1 + 1
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = x & WORDS
        x = (x ^ x >> shift) * factor
    x = x & WORDS
    uniform = ((x ^ x >> 16).double() + 0.5) / (WORDS + 1)
    return (-1 / uniform.log()).clamp(max=1e6).float()


def first_centroids(x: Tensor, count: int, seed: int) -> Tensor:
    """Vectors of each set drawn as k-means++ draws them, fp32 ``[g, count, d]``.

    The first is any; each further one is drawn by its squared distance to the nearest that was
    drawn before, so that no value is drawn twice while another one is left. All sets use the same
    random numbers.

    Args:
        x: fp32 ``[g, n, d]``, n at least 1.
    """
    chances = race(count, x.shape[1], seed, x.device)
    distance = torch.ones_like(x[:, :, 0])
    drawn: list[Tensor] = []
    for chance in chances:
        at = (distance * chance).argmax(1)[:, None, None].expand(-1, -1, x.shape[2])
        drawn.append(x.gather(1, at))
        squared = (x - drawn[-1]).square().sum(2)
        distance = torch.minimum(distance, squared) if len(drawn) > 1 else squared
    return torch.cat(drawn, 1)


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each vector, int64 ``[g, n]``: ``argmin |mu|^2 - 2 x.mu``."""
    nearness = torch.baddbmm(-0.5 * centroids.square().sum(2)[:, None], x, centroids.mT)
    return nearness.argmax(2)


def means(x: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """The mean of the members of each label, fp32 ``[g, C, d]``; without members the centroid.

    A product with the one-hot labels, because its sums have a fixed order and atomic additions
    have none.
    """
    of = labels[..., None] == torch.arange(centroids.shape[1], device=x.device)
    of = of.to(x.dtype)
    sizes = of.sum(1)[..., None]
    return torch.where(sizes > 0, of.mT @ x / sizes.clamp(min=1), centroids)


def kmeans(x: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    """Centroids of each set, fp32 ``[g, count, d]``, after N of Lloyd's iterations.

    Where a set has no more than ``count`` different vectors, each of them is a centroid, up to the
    rounding of a mean of equal numbers; centroids that are left over repeat one of them.

    Args:
        x: fp32 ``[g, n, d]``, finite, below 2**60 in magnitude, n at least 1.
    """
    centroids = first_centroids(x, count, seed)
    for _ in range(iterations):
        centroids = means(x, assign(x, centroids), centroids)
    return centroids
