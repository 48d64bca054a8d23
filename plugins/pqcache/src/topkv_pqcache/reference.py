"""Product quantisation in plain torch: the formulas that the kernels are held to.

Letters: D head dim, m sub-vectors of ``d = D / m`` channels, C centroids, P codebooks of a
request, h kv-heads, G query heads of each, U tokens. Distances are summed in pairs, in one order
here and in the kernels: codes are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1 << 24
"""Squared differences that ``encode`` holds at a time."""


def split(x: Tensor, subvectors: int) -> Tensor:
    """``x [..., D]`` as its sub-vectors, fp32 ``[..., m, d]``."""
    parts: Tensor = x.float().unflatten(-1, (subvectors, -1))
    return parts


def pair_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, filled up to a power of two with zeros, neighbours first."""
    size = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """``argmin_c |x_i - mu_ic|^2``, of equal distances the lower c; uint8 ``[..., m]``.

    Args:
        x: fp32 ``[..., m, d]``.
        centroids: ``[..., m, C, d]``; leading dimensions broadcast.
    """
    distances = pair_sum((x[..., None, :] - centroids.float()).square())
    return distances.argmin(-1).to(torch.uint8)


def encode(k: Tensor, centroids: Tensor) -> Tensor:
    """Codes uint8 ``[n, h, m]`` of keys ``[n, h, D]`` by one codebook ``[h, m, C, d]``."""
    few = max(1, AT_ONCE // centroids.numel())
    parts = split(k, centroids.shape[1]).split(few)
    return torch.cat([nearest(part, centroids) for part in parts])


def book_of(tokens: Tensor, starts: Tensor, books: Tensor) -> Tensor:
    """The codebook of each token: the last one that starts at or before it; 0 where none does.

    Args:
        tokens: positions ``[..., U]``.
        starts: ascending ``[..., P]``, of which the first ``books [...]`` hold.
    """
    there = torch.arange(starts.shape[-1], device=starts.device) < books[..., None]
    began = (starts[..., None, :] <= tokens[..., None]) & there[..., None, :]
    return (began.sum(-1) - 1).clamp(min=0)


def reconstruct(codes: Tensor, book: Tensor, centroids: Tensor) -> Tensor:
    """The keys that codes stand for, fp32 ``[h, n, D]``: sub-vector i is ``mu_{i, code_i}``.

    Args:
        codes: ``[h, n, m]``.
        book: ``[n]``.
        centroids: ``[h, P, m, C, d]``.
    """
    heads, _, subvectors, *_ = centroids.shape
    head = torch.arange(heads, device=codes.device)[:, None, None]
    part = torch.arange(subvectors, device=codes.device)
    return centroids[head, book[:, None], part, codes.long()].float().flatten(-2)


def table(q: Tensor, centroids: Tensor) -> Tensor:
    """``T_i[c] = q_i . mu_ic`` of every codebook, fp32 ``[B, h, G, P, m, C]``.

    Args:
        q: ``[B, H, D]``.
        centroids: ``[B, h, P, m, C, d]``.
    """
    grouped = split(q, centroids.shape[3]).unflatten(1, (centroids.shape[1], -1))
    return torch.einsum("bhgmd,bhpmcd->bhgpmc", grouped, centroids.float())


def coded_scores(q: Tensor, codes: Tensor, book: Tensor, centroids: Tensor) -> Tensor:
    """``sum_i T_i[code_i]``, which is q·k of the reconstructed key, fp32 ``[B, H, U]``.

    Args:
        q: ``[B, H, D]``.
        codes: ``[B, h, U, m]``.
        book: ``[B, U]``, see ``book_of``.
        centroids: ``[B, h, P, m, C, d]``.
    """
    looked_up = table(q, centroids)
    *_, subvectors, count = looked_up.shape
    part = torch.arange(subvectors, device=q.device)
    at = (book[:, None, :, None] * subvectors + part) * count + codes.long()
    at = at.flatten(2)[:, :, None].expand(-1, -1, looked_up.shape[2], -1)
    terms = looked_up.flatten(3).gather(3, at).unflatten(3, (-1, subvectors))
    scores: Tensor = terms.sum(-1).flatten(1, 2)
    return scores


def open_scores(q: Tensor, keys: Tensor) -> Tensor:
    """``q·k`` of keys ``[B, h, W, D]`` for queries ``[B, H, D]``, fp32 ``[B, H, W]``."""
    grouped = q.float().unflatten(1, (keys.shape[1], -1))
    scores: Tensor = (grouped @ keys.float().mT).flatten(1, 2)
    return scores
