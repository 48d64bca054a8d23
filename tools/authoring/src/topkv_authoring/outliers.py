"""Channels of a key that outweigh all others, kept beside a code of the rest.

Keys of some models have a large bias in few channels (Qwen2's reaches several hundred), which RoPE
turns within its pair of channels. A code of few bits is then a code of the bias, and of nothing
else. So the largest pairs leave the key before it is coded, with 8 bits for each of their
channels, and what these bits leave of them stays in the rest: ``key = expand(words) + rest``,
exactly.

Letters: D channels, h = (D + 1) // 2; a pair is channels p and h + p. N pairs at most leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

RATIO = 8.0
"""Factor by which a pair that leaves exceeds the mean magnitude of the other channels."""

MOST_CHANNELS = 1024
"""A word has 9 bits for the number of a pair."""

LEAST, MOST = -64, 63
"""Least and largest power of two that the 8 bits of a pair are multiples of."""


def refusals(dim: int) -> list[str]:
    """Return the reason, if there is one, against keys of D channels."""
    wide = dim > MOST_CHANNELS
    return [f"keys may have at most {MOST_CHANNELS} channels, got {dim}"] if wide else []


def pair_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, of neighbours first, filled up with zeros to a power of two."""
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def split(rows: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Split rows into the pairs that outweigh the others, and the rest.

    A pair is as large as the larger of its channels. Of the N largest, of equal ones the lower,
    those leave that are larger than ``RATIO / D`` times the sum of the magnitudes of all other
    channels. With e the exponent of the larger channel a channel x leaves as
    ``round(x / 2 ** (e - 6))`` of at most 127 in magnitude.

    Args:
        rows: ``[..., D]``, finite; D at most ``MOST_CHANNELS``.
        pairs: N.

    Returns:
        int32 ``[..., N]``: words of two signed bytes, channels h + p and p, 7 bits of
        ``e - 6 - LEAST`` and 9 bits of p, from the highest on, of the largest pair first; 0 where
        no pair leaves. And the rest, fp32 ``[..., D]``: the rows themselves where none does.
    """
    dim = rows.shape[-1]
    half = (dim + 1) // 2
    both = torch.nn.functional.pad(rows.float(), (0, 2 * half - dim)).unflatten(-1, (2, half))
    size, pair = both.abs().amax(-2).sort(dim=-1, descending=True, stable=True)
    size, pair = size[..., :pairs], pair[..., :pairs]
    at = pair[..., None, :].expand(*pair.shape[:-1], 2, -1)
    others = both.scatter(-1, at, 0.0).flatten(-2)[..., :dim].abs()
    leaves = size * dim > RATIO * pair_sum(others)[..., None]
    power = (torch.frexp(size).exponent - 7).clamp(LEAST, MOST)
    codes = torch.floor(torch.ldexp(both.gather(-1, at), -power[..., None, :]) + 0.5)
    codes = codes.clamp(-127, 127) * leaves[..., None, :]
    gone = torch.zeros_like(both).scatter(-1, at, torch.ldexp(codes, power[..., None, :]))
    low, high = (codes.int() & 255).unbind(-2)
    words = pair.int() | power - LEAST << 9 | low << 16 | high << 24
    words = torch.where(leaves, words, 0)
    words = torch.nn.functional.pad(words, (0, pairs - words.shape[-1]))
    return words, (both - gone).flatten(-2)[..., :dim]


def expand(words: Tensor, dim: int) -> Tensor:
    """Expand words ``[..., N]`` to rows of the channels that left, fp32 ``[..., dim]``, else 0.

    Anything else than words gives arbitrary values.
    """
    half = (dim + 1) // 2
    pair, power = (words & 511).long().clamp(max=half - 1), (words >> 9 & 127) + LEAST
    codes = torch.stack([words << 8 >> 24, words >> 24], dim=-2).float()
    both = codes.new_zeros((*words.shape[:-1], 2, half))
    at = pair[..., None, :].expand_as(codes)
    # Words of no pair add 0 to pair 0.
    both = both.scatter_add(-1, at, torch.ldexp(codes, power[..., None, :]))
    return both.flatten(-2)[..., :dim]
