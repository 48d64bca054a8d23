"""Sign codes of rotated keys in plain torch: the formulas that the kernels are held to.

Shapes: D head dim, P the power of two from 16 on that holds it, Hkv kv-heads, U = ``max_units``
tokens. Sums are taken in pairs, in one order here and in the kernels: codes are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv_authoring.outliers import expand, pair_sum, split

SEED = 42
"""Seed of the signs of the rotation, one for all: pages outlive a process."""

BITS = 16
"""Coordinates whose signs a word of a code holds."""


def width(dim: int) -> int:
    """P: coordinates of a rotated key of ``dim`` channels, a power of two."""
    return max(BITS, 1 << (dim - 1).bit_length())


def flips(dim: int) -> Tensor:
    """The signs that channels are multiplied with before the Hadamard transform; fp32 ``[P]``."""
    generator = torch.Generator().manual_seed(SEED)
    return 1.0 - 2 * torch.randint(0, 2, (width(dim),), generator=generator)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """``H (signs * x)`` of ``x [..., D]``, filled up with zeros: fp32 ``[..., P]``.

    H is Sylvester's Hadamard matrix with entries of 1 and -1: ``rotate(x) . rotate(y)`` is
    ``P x.y``. Each step adds and subtracts neighbours and puts the sums in front of the
    differences; after log2(P) of them every coordinate is back in its place.
    """
    wide = len(signs)
    x = torch.nn.functional.pad(x.float(), (0, wide - x.shape[-1])) * signs
    for _ in range(wide.bit_length() - 1):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.cat([even + odd, even - odd], dim=-1)
    return x


def encode(k: Tensor, signs: Tensor, outliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Code, factor and outliers of keys ``k [..., D]``, which up to ``outliers`` pairs may leave.

    Returns:
        int16 ``[..., P / 16]``: bit j of word i says that coordinate ``16 i + j`` of the rotated
        rest z is negative, with r as what ``topkv_authoring.outliers`` leaves of a key; bfloat16
        ``[...]``: ``|r|^2 / |z|_1``, 0 for a rest of zeros, with the sign bit set where something
        left the key; and int32 ``[..., N]``: the words of what left.
    """
    words, rest = split(k, outliers)
    z = rotate(rest, signs)
    square = torch.nn.functional.pad(rest.square(), (0, len(signs) - k.shape[-1]))
    length = pair_sum(z.abs())
    factor = pair_sum(square) / torch.where(length > 0, length, 1.0)
    factor = torch.where(words[..., 0] != 0, -factor, factor)
    bit = torch.arange(BITS, device=k.device)
    negative = ((z < 0).unflatten(-1, (-1, BITS)) << bit).sum(-1)
    return negative.to(torch.int16), factor.bfloat16(), words


def decode(codes: Tensor) -> Tensor:
    """Signs ``[..., P]``, fp32 1 and -1, of codes ``[..., P / 16]``."""
    bit = torch.arange(BITS, device=codes.device)
    return 1.0 - 2 * (codes.int()[..., None] >> bit & 1).flatten(-2)


def head_scores(q: Tensor, codes: Tensor, factor: Tensor, words: Tensor, signs: Tensor) -> Tensor:
    """``|factor| * (sign(z) . rotate(q)) + q . o`` with the outliers o of a key, an estimate of
    q·k, fp32 ``[B, H, U]``.

    Args:
        q: ``[B, H, D]``.
        codes: ``[B, U, Hkv, P / 16]``.
        factor: ``[B, U, Hkv]``.
        words: of outliers, ``[B, U, Hkv, N]``.
        signs: of the rotation.
    """
    heads = (codes.shape[2], -1)
    rotated = rotate(q, signs).unflatten(1, heads)
    scores = torch.einsum("bhgd,buhd->bhgu", rotated, decode(codes))
    scores *= factor.abs().float().permute(0, 2, 1)[:, :, None]
    outliers = expand(words, q.shape[-1])
    scores += torch.einsum("bhgd,buhd->bhgu", q.float().unflatten(1, heads), outliers)
    return scores.flatten(1, 2)
