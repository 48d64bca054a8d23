"""The first stage in plain torch: what the end of a prompt keeps of it. Cold, all of it.

Shapes: W voters (the last prompt queries), n tokens of the prompt, N lanes. Votes are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096
"""Keys whose votes are counted at a time: bounds the memory of ``[H, W, keys]``."""


def votes(
    q: Tensor, lse: Tensor, positions: Tensor, k: Tensor, start: int, scale: float
) -> Tensor:
    """Attention mass that the voters give to a block of keys, by kv-head.

    The sum over voters and their query heads of ``exp(q . k scale - lse)``: with the log-sum-exp
    of the whole row each term is that row's softmax weight, whatever the blocks are.

    Args:
        q: ``[W, H, D]``.
        lse: fp32 ``[W, H]`` natural log-sum-exp of the voters' causal attention.
        positions: ``[W]`` position of each voter; negative ones have no vote.
        k: ``[m, Hkv, D]`` keys of positions ``start ..``.
        start: of the block.
        scale: factor of the logits.

    Returns:
        fp32 ``[Hkv, m]``.
    """
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    rows = q.float().unflatten(1, (heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
    logs = lse.unflatten(1, (heads, group)).permute(1, 2, 0).flatten(1, 2)
    seen = start + torch.arange(len(k), device=k.device) <= positions.repeat(group)[:, None]
    weights = torch.exp(torch.bmm(rows, k.float().permute(1, 2, 0)) * scale - logs[..., None])
    return torch.where(seen, weights, 0.0).sum(1)


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """The largest of ``kernel`` votes around each position, ``[N, n]``."""
    pool = torch.nn.functional.max_pool1d
    return pool(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def best(scores: Tensor, count: int) -> Tensor:
    """bool ``[N, n]``: the ``count`` best scores of each row; of equal ones the lower position."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def units_of(tokens: Tensor, unit: int) -> Tensor:
    """bool ``[N, units]``: those that hold one of ``tokens``, bool ``[N, n]``."""
    padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % unit))
    return padded.unflatten(1, (-1, unit)).any(-1)
