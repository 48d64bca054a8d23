"""Double Sparsity in plain torch: the formulas that the kernels are held to.

Shapes: n tokens or rows in front, Hkv kv-heads, H query heads, D head dim, r channels of a label,
U = ``max_units`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0
"""Largest fp16; keys beyond it saturate in 4-bit labels."""

LARGE = 4.0
"""A channel is large if it reaches this many times as far as the one in the middle."""

MOST_HALVINGS = 8
"""A large channel is divided by ``2 ** MOST_HALVINGS`` at most, so that fp16 queries, which are
multiplied by as much, stay finite."""

SAMPLE = 4096
"""Most tokens of a request that the normaliser of a query head is estimated from."""


def choose(importance: Tensor, channels: int) -> Tensor:
    """The most important channels of ``[Hkv, D]``, ascending; int32 ``[Hkv, r]``.

    Of equal ones the lower channel comes first.
    """
    best = importance.argsort(dim=-1, descending=True, stable=True)[:, :channels]
    return best.sort(dim=-1).values.to(torch.int32)


def narrowed(label: Tensor, ranges: Tensor) -> Tensor:
    """Channels ``[..., r]`` as they are coded, fp32: shifted and divided by ``[..., r, 2]``."""
    shift, divisor = ranges.unbind(-1)
    return (label.float() - shift) / divisor


def gather(x: Tensor, channels: Tensor) -> Tensor:
    """Channels ``[n or 1, Hkv, r]`` of ``x [n, Hkv, D]``: ``[n, Hkv, r]``."""
    return x.gather(-1, channels.long().expand(*x.shape[:2], -1))


def ranges(least: Tensor, most: Tensor) -> Tensor:
    """Shift and divisor of the channels of a 4-bit label, fp32 ``[..., r, 2]``.

    Channels of a label share a scale. Keys of some models have a large bias in few of them, of
    several hundred in Qwen2, and the scale would say nothing of the others. A channel reaches as
    far as its largest magnitude. One that reaches more than ``LARGE`` times as far as the lower
    middle one of all r is shifted by the middle of its range, which changes no softmax, and
    divided by a power of two that leaves it within twice the reach of the middle one. All others
    have 0 and 1.

    Args:
        least, most: fp32 ``[..., r]``, of each channel over the keys that are known.
    """
    reach = torch.maximum(least.abs(), most.abs())
    middle = reach.sort(-1).values[..., (reach.shape[-1] - 1) // 2, None]
    large = reach > LARGE * middle
    half = most / 2 - least / 2
    halvings = torch.frexp(half / torch.where(middle > 0, 2 * middle, torch.inf)).exponent
    divisor = torch.ldexp(torch.ones_like(half), halvings.clamp(0, MOST_HALVINGS))
    none = torch.stack([torch.zeros_like(half), torch.ones_like(half)], -1)
    return torch.where(large[..., None], torch.stack([least + half, divisor], -1), none)


def fp16_down(x: Tensor) -> Tensor:
    """fp32 ``x`` to the largest fp16 value that is not above it."""
    near = x.half()
    back, bits = near.float(), near.view(torch.int16).int()
    lower = torch.where(back > 0, bits - 1, torch.where(back < 0, bits + 1, -32767))
    return torch.where(back > x, lower, bits).to(torch.int16).view(torch.float16)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """4-bit labels of the channels ``x [..., r]`` of a token and head.

    ``zero`` is the smallest channel and ``scale`` a fifteenth of the range, both rounded so that
    the range still covers every channel: no channel is off by more than half a scale.

    Returns:
        codes, uint8 ``[..., (r + 1) // 2]``: byte j holds channel j in its low and channel
        ``(r + 1) // 2 + j`` in its high four bits; and fp16 ``[..., 2]``: scale and zero.
    """
    x = x.float().clamp(-LARGEST, LARGEST) + 0.0
    zero = fp16_down(x.amin(-1))
    span = x.amax(-1) - zero.float()
    scale = -fp16_down(-span / 15) + 0.0
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(15 * scale.float() < span, above, scale)
    step = scale.float()[..., None]
    codes = (x - zero.float()[..., None]) / torch.where(step > 0, step, 1.0)
    codes = torch.floor(codes + 0.5).clamp(0, 15).to(torch.uint8)
    half = (x.shape[-1] + 1) // 2
    high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - x.shape[-1]))
    return codes[..., :half] | high << 4, torch.stack([scale, zero], dim=-1)


def dequantize(codes: Tensor, meta: Tensor, channels: int) -> Tensor:
    """fp32 ``[..., r]``: ``zero + scale * code``."""
    code = torch.cat([codes & 15, codes >> 4], dim=-1)[..., :channels].float()
    scale, zero = meta.float().unbind(-1)
    return code * scale[..., None] + zero[..., None]


def head_logits(q: Tensor, channels: Tensor, labels: Tensor) -> Tensor:
    """Sum over the channels of a label of q times label, fp32 ``[n, H, U]``.

    Args:
        q: ``[n, H, D]``.
        channels: ``[n, Hkv, r]``.
        labels: ``[n, U, Hkv, r]``.
    """
    rows, heads, dim = q.shape
    kv_heads, width = channels.shape[1:]
    q = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    index = channels.long()[:, :, None].expand(-1, -1, heads // kv_heads, width)
    return torch.einsum("nhgr,nuhr->nhgu", q.gather(-1, index), labels.float()).flatten(1, 2)


def sampled(closed: Tensor, width: int) -> Tensor:
    """True for each of tokens ``0 .. width - 1`` that the normalisers see: bool ``[n, width]``.

    The middle one of every s tokens, with s the smallest power of two for which at most ``SAMPLE``
    are taken: all of them up to ``SAMPLE`` tokens. Depends on ``closed [n]`` alone.
    """
    stride = torch.ones_like(closed)
    for _ in range(doublings(width)):
        stride = torch.where(closed > SAMPLE * stride, 2 * stride, stride)
    token = torch.arange(width, device=closed.device)
    stride = stride[:, None]
    return (token % stride == stride // 2) & (token < closed[:, None])


def doublings(width: int) -> int:
    """Number of times that the stride of the sample of ``width`` tokens is doubled."""
    return max(0, (-(-width // SAMPLE) - 1).bit_length())


def lane_scores(
    logits: Tensor, closed: Tensor, lane_heads: int, sinks: int, real: Tensor | None = None
) -> Tensor:
    """Scores of tokens over the query heads of each lane, fp32 ``[n * lane_heads, U]``.

    ``log(sum over the heads g of exp(logit_g - lse_g))``, with ``lse_g`` the log-sum-exp of the
    head's logits over the sample: the order of the mean softmax, without its underflow, where
    the sample is everything. The normaliser only weighs the heads of a lane against each other;
    the only head of a lane needs none, and its scores are its logits.

    Args:
        logits: fp32 ``[n, H, U]``, scaled; logits behind ``closed`` have no influence.
        closed: ``[n]`` selectable tokens.
        lane_heads: lanes of a row.
        sinks: first tokens, which get +inf.
        real: bool ``[n, H]``, False for heads of queries that are padding; None for no such.
    """
    token = torch.arange(logits.shape[-1], device=logits.device)
    if logits.shape[1] == lane_heads:
        scores = logits.flatten(0, 1)
    else:
        seen = logits.masked_fill(~sampled(closed, len(token))[:, None], float("-inf"))
        # The maximum first: near it the difference of two logits is exact.
        peak = seen.amax(-1, keepdim=True)
        logits = logits - peak - (seen - peak).exp().sum(-1, keepdim=True).log()
        if real is not None:
            logits = logits.masked_fill(~real[..., None], float("-inf"))
        scores = logits.unflatten(1, (lane_heads, -1)).logsumexp(2).flatten(0, 1)
    return scores.masked_fill(token < sinks, float("inf"))
