"""Spherical k-means: cosine to the centroid decides, the centroid is the mean of its members.

Shapes: h kv-heads, each clustered on its own, n keys, C clusters, D head dim. fp32 throughout,
no host sync, no shape that depends on the keys, no random order of sums: the same keys give the
same clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**18
"""Cosines are compared in steps of 1 / GRID: beyond what fp32 sums get wrong, so that parallel
keys tie, however a device blocks its sums, and the lower cluster wins."""


def unit_vectors(x: Tensor) -> Tensor:
    """``x [..., D]`` at length 1, zeros as they are. Large and small keys do not overflow."""
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return x / x.norm(dim=-1, keepdim=True).clamp(min=0.5)


def assign(directions: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each key by cosine; of equal cosines the lower one.

    Args:
        directions: fp32 ``[h, n, D]`` unit vectors of the keys.
        centroids: fp32 ``[h, C, D]``.

    Returns:
        labels int64 ``[h, n]``.
    """
    cosines = directions @ unit_vectors(centroids).transpose(1, 2)
    return cosines.mul_(GRID).round_().max(-1).indices


def means(keys: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The mean ``[h, C, D]`` of the unnormalised members, and their number ``[h, C]`` in fp32.

    0 for clusters without members. A product with the one-hot labels, because its sums have a
    fixed order and atomic additions have none.
    """
    of = labels[..., None] == torch.arange(clusters, device=labels.device)
    of = of.to(keys.dtype)
    sizes = of.sum(1)
    return of.transpose(1, 2) @ keys / sizes.clamp(min=1)[..., None], sizes


def spread(tokens: int, clusters: int, seed: int) -> Tensor:
    """Positions ``[C]`` of the first centroids: one from each of C equal runs of the keys."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.arange(clusters + 1) * tokens // clusters
    chance = torch.rand(clusters, generator=generator)
    return edges[:-1] + (chance * edges.diff()).long().clamp(max=tokens - 1)


def _reseed(
    keys: Tensor, directions: Tensor, labels: Tensor, centroids: Tensor, sizes: Tensor
) -> Tensor:
    """Give the i-th empty cluster of a head the key that fits its own cluster i-th worst."""
    own = unit_vectors(centroids).gather(1, labels[..., None].expand_as(keys))
    fit = (directions * own).sum(-1).mul_(GRID).round_()
    worst = fit.sort(dim=-1, stable=True).indices[:, : centroids.shape[1]]
    nth = ((sizes == 0).cumsum(1) - 1).clamp(min=0)
    chosen = worst.gather(1, nth)[..., None].expand_as(centroids)
    return torch.where((sizes == 0)[..., None], keys.gather(1, chosen), centroids)


def kmeans(keys: Tensor, first: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster each head's keys.

    An iteration assigns all keys and then takes the means. A cluster that lost all its members
    starts again at the key that fits its own cluster worst, but in the last iteration it keeps
    its centroid and stays empty. At a fixed point every label is that of the nearest of the
    returned centroids; before it, of those that the last iteration began with.

    Args:
        keys: fp32 ``[h, n, D]``, finite.
        first: int64 ``[C]`` distinct positions of the first centroids, C at most n.
        iterations: at least 1.

    Returns:
        labels int64 ``[h, n]``, centroids fp32 ``[h, C, D]``, sizes fp32 ``[h, C]``.
    """
    directions, centroids = unit_vectors(keys), keys[:, first]
    for iteration in range(iterations):
        labels = assign(directions, centroids)
        centre, sizes = means(keys, labels, len(first))
        centroids = torch.where((sizes > 0)[..., None], centre, centroids)
        if iteration < iterations - 1:
            centroids = _reseed(keys, directions, labels, centroids, sizes)
    return labels, centroids, sizes
