"""Top-p over 4-bit keys in plain torch: the formulas that the kernels are held to.

Shapes: D head dim, N lanes, h query heads of a lane, K' candidates of which at most K are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv_authoring.bounds import bf16_up
from topkv_authoring.outliers import expand, split


def encode(k: Tensor, outliers: int) -> tuple[Tensor, Tensor, Tensor]:
    """The 4-bit copy of keys ``k [..., D]``, of each token and kv-head for itself.

    It is of what ``topkv_authoring.outliers`` leaves of a key; at most this many pairs leave it.
    ``zero`` is the smallest channel, rounded down, and ``scale`` a fifteenth of the range from
    there, rounded up, so that no channel is off by more than half a scale (and fp32 rounding).

    Returns:
        codes, uint8 ``[..., (D + 1) // 2]``: byte j holds channel 2 j in its low and channel
        2 j + 1 in its high four bits; bfloat16 ``[..., 2]``: scale, with the sign bit set where
        something left the key, and zero; and int32 ``[..., N]``: the words of what left.
    """
    words, rest = split(k, outliers)
    x = rest + 0.0  # -0.0 is 0.0
    zero = -bf16_up(-x.amin(-1)) + 0.0
    scale = bf16_up((x.amax(-1) - zero) / 15)
    step = torch.where(scale > 0, scale, 1.0)[..., None]
    codes = torch.floor((x - zero[..., None]) / step + 0.5).clamp(0, 15).to(torch.uint8)
    even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    low, high = even.unflatten(-1, (-1, 2)).unbind(-1)
    scale = torch.where(words[..., 0] != 0, -scale, scale)
    return low | high << 4, torch.stack([scale, zero], dim=-1).bfloat16(), words


def decode(codes: Tensor, meta: Tensor, words: Tensor, dim: int) -> Tensor:
    """fp32 ``[..., dim]``: ``zero + |scale| * code``, and what left."""
    code = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., :dim].float()
    scale, zero = meta.float().unbind(-1)
    return code * scale.abs()[..., None] + zero[..., None] + expand(words, dim)


def kept(worth: Tensor, p: float, most: int) -> Tensor:
    """True for candidates that are kept, bool ``[N, K']``: the first ones by rank, until every
    query head of the lane has the share p of its weight among them, and at most ``most``.

    A candidate weighs ``exp(worth - peak)`` to a query head, with its largest worth as peak. Its
    rank is the largest share of a head's whole weight that it has; of equal ranks the lower unit
    comes first. Weights and ranks are fp32, and so is p times the whole weight. With p = 1 nothing
    is enough, and candidates without weight are kept too.

    Args:
        worth: fp32 ``[N, h, K']`` of candidates in ascending order, -inf where there is none, and
            for heads of queries that are padding.
        p: above 0, at most 1.
        most: K.
    """
    there = worth[:, 0] > float("-inf")
    peak = worth.amax(-1, keepdim=True)
    # Nothing has weight to a head of a query that is padding, and nothing is enough for it.
    weight = (worth - peak.masked_fill(peak.isneginf(), 0)).exp()
    whole = weight.sum(-1, keepdim=True)
    rank = (weight / torch.where(whole > 0, whole, 1.0)).amax(1).masked_fill(~there, -1)
    order = rank.sort(dim=1, descending=True, stable=True).indices
    ordered = weight.gather(2, order[:, None].expand_as(weight))
    before = torch.nn.functional.pad(ordered.double().cumsum(-1), (1, 0))[..., :-1]
    enough = (before >= p * whole).all(1) & (p < 1)
    enough |= torch.arange(order.shape[1], device=order.device) >= most
    return torch.zeros_like(there).scatter(1, order, ~enough) & there


def placed(candidates: Tensor, keep: Tensor, width: int) -> Tensor:
    """The candidates that are kept, ``[N, width]``, -1 elsewhere.

    Each stays at its place where there are places for all candidates, else they move up to the
    front in the order in which they came.
    """
    if candidates.shape[1] <= width:
        lacking = width - candidates.shape[1]
        return torch.nn.functional.pad(torch.where(keep, candidates, -1), (0, lacking), value=-1)
    at = torch.where(keep, keep.cumsum(1) - 1, width)
    left = candidates.new_full((len(candidates), width + 1), -1)
    return left.scatter(1, at, candidates)[:, :width]
