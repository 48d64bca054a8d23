"""Double Sparsity in plain torch: the formulas that the kernels are held to.

Shapes: n tokens or rows in front, Hkv kv-heads, H query heads, D head dim, r channels of a label,
U = ``max_units`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0
"""Largest fp16; keys beyond it saturate in 4-bit labels."""


def ranked(importance: Tensor) -> Tensor:
    """Channels ``[Hkv, D]`` by descending importance; of equal ones the lower channel first."""
    return importance.argsort(dim=-1, descending=True, stable=True)


def choose(importance: Tensor, channels: int, pairs: bool) -> Tensor:
    """The most important channels, ascending; int32 ``[Hkv, r]``.

    Args:
        importance: ``[Hkv, D]``.
        channels: r.
        pairs: take channels c and c + D/2, which RoPE rotates into each other, together; a
            pair is worth the sum of both.
    """
    if pairs:
        half = importance.shape[-1] // 2
        low = ranked(importance[:, :half] + importance[:, half:])[:, : channels // 2]
        best = torch.cat([low, low + half], dim=-1)
    else:
        best = ranked(importance)[:, :channels]
    return best.sort(dim=-1).values.to(torch.int32)


def gather(x: Tensor, channels: Tensor) -> Tensor:
    """Channels ``[n or 1, Hkv, r]`` of ``x [n, Hkv, D]``: ``[n, Hkv, r]``."""
    return x.gather(-1, channels.long().expand(*x.shape[:2], -1))


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


def host_rows(page_table: Tensor, slots: Tensor, tokens: Tensor, page_tokens: int) -> Tensor:
    """Rows of the token pools of ``tokens`` of request ``slots``, int64."""
    page = page_table[slots.long(), tokens.long() // page_tokens].long()
    return page * page_tokens + tokens % page_tokens


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


def lane_scores(
    logits: Tensor, closed: Tensor, lane_heads: int, sinks: int
) -> tuple[Tensor, Tensor]:
    """Mean softmax over the query heads of each lane, and how flat it is.

    Args:
        logits: fp32 ``[n, H, U]``, scaled; what stands behind ``closed`` has no influence.
        closed: ``[n]`` selectable tokens.
        lane_heads: lanes of a row.
        sinks: first tokens, which get +inf.

    Returns:
        scores fp32 ``[n * lane_heads, U]``, and flatness fp32 ``[n * lane_heads]``: the mean over
        the query heads of the entropy of their softmax, over ``log(closed)``, its maximum.
    """
    rows, heads, width = logits.shape
    token = torch.arange(width, device=logits.device)
    logits = logits.masked_fill(token >= closed[:, None, None], float("-inf"))
    weights = logits.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).view(rows, lane_heads, -1).mean(2)
    flatness = entropy / closed.clamp(min=2).float().log()[:, None]
    scores = weights.view(rows, lane_heads, heads // lane_heads, width).mean(2).flatten(0, 1)
    return scores.masked_fill(token < sinks, float("inf")), flatness.flatten()
