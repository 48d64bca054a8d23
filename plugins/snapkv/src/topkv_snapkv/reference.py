"""SnapKV in plain torch: votes, pooling and choice. Cold, all of it, but ``select``.

Shapes: W voters (the last prompt queries), n tokens of the prompt, N lanes. Votes are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.hooks.topk import TopK
from topkv.ops.topk import topk

NEVER = torch.iinfo(torch.int32).max
"""Stands for no position; sorts behind every one."""

BLOCK = 4096
"""Keys whose votes are counted at a time: bounds the memory of ``[H, W, keys]``."""


def votes(
    q: Tensor, lse: Tensor, positions: Tensor, k: Tensor, start: int, scale: float
) -> Tensor:
    """Attention mass that the voters give to a block of keys, by kv-head.

    The sum over voters and their query heads of ``exp(q . k scale - lse)``: with the log-sum-exp
    of the whole row, each term is that row's softmax weight, so blocks need not know of each
    other.

    Args:
        q: ``[W, H, D]``.
        lse: fp32 ``[W, H]`` natural log-sum-exp of the voters' causal attention.
        positions: ``[W]`` position of each voter; negative ones have no vote.
        k: ``[m, Hkv, D]`` keys of positions ``start ..``.
        scale: factor of the logits.

    Returns:
        fp32 ``[Hkv, m]``.
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    voters = q.float().unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
    rows = lse.unflatten(1, (kv_heads, group)).permute(1, 2, 0).flatten(1, 2)
    seen = start + torch.arange(len(k), device=k.device) <= positions.repeat(group)[:, None]
    logits = torch.bmm(voters, k.float().permute(1, 2, 0)) * scale
    weights = torch.exp(logits - rows[..., None])
    return torch.where(seen, weights, 0.0).sum(1)


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """The largest of ``kernel`` votes around each position, ``[N, n]``."""
    pool = torch.nn.functional.max_pool1d
    return pool(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def best(scores: Tensor, count: int, work: TopK | None) -> Tensor:
    """int32 ``[N, count]`` positions of the best scores, ascending, -1 behind them.

    ``work`` is from ``AlgorithmSetup.topk``; None for plain torch.
    """
    ids = torch.empty((len(scores), count), dtype=torch.int32, device=scores.device)
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=ids.device)
    impl = "reference" if work is None else "triton"
    topk(scores.contiguous(), lengths, ids, impl=impl, work=work)
    return ids


def select(
    kept: Tensor, count: Tensor, prompt: Tensor, lengths: Tensor, cap: int, room: int, width: int
) -> Tensor:
    """The kept positions of each lane, then the newest generated ones. Hot.

    Args:
        kept: ``[N, cap or more]`` ascending, -1 behind ``count``.
        count: ``[N]``.
        prompt: ``[N]`` tokens of the prompt; generated ones follow.
        lengths: ``[N]`` tokens of the request; the newest is not selectable.
        cap: places for the prompt. What a shorter prompt leaves free goes to generated tokens.
        room: places for generated tokens.
        width: K.

    Returns:
        ``[N, K]``: nothing from ``lengths - 1`` on, even where the prompt was cut since.
    """
    count, prompt, last = count[:, None], prompt[:, None], lengths[:, None] - 1
    column = torch.arange(width, device=kept.device)
    inside = torch.nn.functional.pad(kept, (0, width - kept.shape[1]), value=-1)
    first = torch.maximum(prompt, last - room - (cap - prompt).clamp(min=0))
    ids = torch.where(column < count, inside, first + column - count)
    return torch.where(ids < last, ids, -1)
