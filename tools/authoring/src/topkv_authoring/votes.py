"""Votes of the end of a prompt for what of it is kept, as SnapKV has them. Cold, all of it.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, arXiv 2404.14469.
Shapes: W voters (the last prompt queries), n tokens of the prompt, N lanes. Votes are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv.hooks.algorithm import History, RepresentationSpec
from topkv.types import GroupShape, LayerView, ModelShape

BLOCK = 4096
"""Keys whose votes are counted at a time: bounds the memory of ``[H, W, keys]``."""


def block_votes(
    q: Tensor, lse: Tensor, positions: Tensor, k: Tensor, start: int, scale: float
) -> Tensor:
    """Attention mass that the voters give to a block of keys, by kv-head.

    The sum over voters and their query heads of ``exp(q . k scale - lse)``: with the log-sum-exp
    of the whole row each term is that row's softmax weight, so blocks need not know of each other.

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


class Voting:
    """Mix-in of algorithms: the last queries of a prompt vote when it is settled.

    Only those of the newest prompt vote, and none that was taken back.

    Attributes:
        model, group, params: as in the setup; the parameter ``window`` is W.
    """

    model: ModelShape
    group: GroupShape
    params: Any

    def voters(self) -> tuple[RepresentationSpec, ...]:
        """Pools of grain request with the last W prompt queries, position p in row ``p % W``.

        queries ``[W, H, D]``, lse fp32 ``[W, H]``, and voters int32 ``[W]``: p + 1, 0 in empty
        rows.
        """
        window, heads = self.params.window, self.model.num_heads
        shape = (window, heads, self.model.head_dim)
        return (
            RepresentationSpec("queries", "request", shape, self.model.dtype),
            RepresentationSpec("lse", "request", (window, heads), torch.float32),
            RepresentationSpec("voters", "request", (window,), torch.int32),
        )

    def gather_voters(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        k: Tensor,
        q: Tensor,
        lse: Tensor,
        settled: Tensor,
    ) -> None:
        """Keep the queries at the end of a chunk, for ``construct``, whose arguments these are.

        Args:
            settled: an element of a pool of the request: other than 0 if a settle came since the
                last chunk, so that this one begins a prompt of its own. It becomes 0.
        """
        window, pools, end = self.params.window, layer.pools, start + len(k)
        first, count = end - len(q), min(len(q), window)
        voters = pools["voters"][slot]
        voters *= (settled == 0) & (voters <= first)
        positions = torch.arange(end - count, end, device=q.device)
        rows = positions % window
        pools["queries"][slot, rows] = q[len(q) - count :]
        pools["lse"][slot, rows] = lse[len(q) - count :]
        voters[rows] = (positions + 1).int()
        settled.zero_()

    def votes(self, layer: LayerView, slot: int, length: int, history: History) -> Tensor:
        """The mass that the window's queries give to each position, fp32 ``[lanes, length]``."""
        who, pools, lanes = type(self).__name__, layer.pools, self.group.lane_heads
        positions = pools["voters"][slot] - 1
        inside = (positions >= length - self.params.window) & (positions < length)
        positions = torch.where(inside, positions, -1)
        q, lse = pools["queries"][slot], pools["lse"][slot]
        blocks, done = [], 0
        for start, k, _ in history:
            if start != done:
                raise ValueError(
                    f"{who}: slot {slot} votes over its whole history, which must come in order "
                    f"from position 0; expected a block at {done}, got one at {start}"
                )
            for first in range(0, len(k), BLOCK):
                what = (q, lse, positions, k[first : first + BLOCK], start + first)
                mass = block_votes(*what, self.model.scale)
                blocks.append(mass.unflatten(0, (lanes, -1)).sum(1))
            done += len(k)
        if done != length:
            raise ValueError(
                f"{who}: slot {slot} votes over its {length} tokens, and the history has {done}"
            )
        return torch.cat(blocks, 1)
