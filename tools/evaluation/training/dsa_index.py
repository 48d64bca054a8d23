"""Index scores of DeepSeek Sparse Attention, their selection, and the loss that trains them.

DeepSeek-AI, "DeepSeek-V3.2", 2025, sections 2.1 and 2.1.1. A row t scores the tokens s <= t,
``I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])``, and attends to the top-k of them. The target of
the scores is ``p[t]``, the attention probabilities summed over the heads and normalised to sum
to 1; their loss is ``KL(p[t] || softmax(I[t]))``, over all tokens before t in the warm-up and
over the selected ones in the sparse stage.

Everything of size [rows, tokens] is made for one block of rows at a time. A step keeps of it only
the masks of the selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 28
"""Entries [B, heads, rows, tokens] of a block, 1 GiB in fp32; about eight of them live at once."""


@dataclass(frozen=True)
class IndexRows:
    """Index of a layer for a batch; see ``topkv.types.Index``.

    Attributes:
        q: [B, n, H^I, D^I].
        k: [B, n, D^I].
        weights: [B, n, H^I], every scale factor in them.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return scores [B, Q, n] fp32 of the rows of ``q`` and ``weights`` for tokens of ``k``."""
    batch, rows, heads, _ = q.shape
    products = torch.relu(q.float().flatten(1, 2) @ k.float().mT)
    products = products.view(batch, rows, heads, -1)
    scores: Tensor = weights.float().unsqueeze(-2) @ products
    return scores.squeeze(-2)


def attention_mass(q: Tensor, k: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """The target p [B, Q, n] fp32: attention summed over the heads, each row normalised to 1.

    Args:
        q: [B, H, Q, d] and k: [B, H, n, d].
        allowed: [B or 1, Q, n] bool, at least one token in each row.
        scaling: factor of the products.
    """
    products = (q.float() * scaling) @ k.float().mT
    products = products.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    mass: Tensor = products.softmax(-1).sum(1)
    return mass / mass.sum(-1, keepdim=True)


def divergence(target: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """KL(target || softmax of the allowed scores) [B, Q] in nats; target is 0 elsewhere."""
    log_share = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1)
    log_share = log_share.masked_fill(~allowed, 0.0)
    terms: Tensor = torch.special.xlogy(target, target) - target * log_share
    return terms.sum(-1)


def causal(rows: Tensor, tokens: int) -> Tensor:
    """[1, Q, tokens] bool: the tokens that each of the ``rows`` [Q], by position, may see."""
    return (torch.arange(tokens, device=rows.device) <= rows[:, None])[None]


def select(scores: Tensor, rows: Tensor, topk: int | None) -> Tensor:
    """[B or 1, Q, n] bool: the visible tokens, if more than ``topk`` those that score best."""
    allowed = causal(rows, scores.shape[-1])
    if topk is None or scores.shape[-1] <= topk:
        return allowed
    best = scores.masked_fill(~allowed, float("-inf")).topk(topk, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & allowed


def blocks(batch: int, heads: int, tokens: int, elements: int) -> Iterator[slice]:
    """Blocks of rows, ``tokens`` in all, each of at most ``elements`` entries or of one row."""
    rows = max(1, elements // (batch * heads * tokens))
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def positions(rows: slice, like: Tensor) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=like.device)


@torch.no_grad()
def selections(index: IndexRows, topk: int, elements: int) -> list[Tensor]:
    """Return masks [B or 1, Q, end] bool of the blocks of rows; a block ends at ``end``."""
    batch, tokens, heads = index.weights.shape
    return [
        select(
            index_scores(index.q[:, rows], index.k[:, : rows.stop], index.weights[:, rows]),
            positions(rows, index.k),
            topk,
        )
        for rows in blocks(batch, heads, tokens, elements)
    ]


class _IndexLoss(torch.autograd.Function):
    """The mean divergence, whose gradient is made along with it, block by block.

    Autograd would keep the products [B, Q, H^I, n] of every block until its backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        q: Tensor,
        k: Tensor,
        scaling: float,
        topk: int | None,
        elements: int,
    ) -> tuple[Tensor, ...]:
        batch, tokens, heads = index_weights.shape
        gradients = [torch.zeros_like(t) for t in (index_q, index_k, index_weights)]
        total, masks = index_weights.new_zeros(()), []
        for rows in blocks(batch, max(heads, q.shape[1]), tokens, elements):
            parts = (slice(None), rows), (slice(None), slice(rows.stop)), (slice(None), rows)
            leaves = [
                tensor[part].detach().requires_grad_()
                for tensor, part in zip((index_q, index_k, index_weights), parts, strict=True)
            ]
            with torch.enable_grad():
                scores = index_scores(*leaves)
            allowed = select(scores.detach(), positions(rows, q), topk)
            target = attention_mass(q[:, :, rows], k[:, :, : rows.stop], allowed, scaling)
            with torch.enable_grad():
                loss = divergence(target, scores, allowed).sum() / (batch * tokens)
            found = torch.autograd.grad(loss, leaves)
            for gradient, part, new in zip(gradients, parts, found, strict=True):
                gradient[part] += new
            total += loss.detach()
            masks.append(allowed)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*masks)
        return total, *masks

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *(upstream * gradient for gradient in ctx.saved_tensors), *(None,) * 5


def index_loss(
    index: IndexRows,
    q: Tensor,
    k: Tensor,
    scaling: float,
    topk: int | None,
    elements: int = BLOCK_ELEMENTS,
) -> tuple[Tensor, list[Tensor]]:
    """The indexer's loss, which sends gradients to ``index`` alone, and the masks it was made for.

    Args:
        q, k: [B, H, n, d], queries and keys of the attention.
        topk: tokens of a row's selection, to which the loss keeps; None for all visible ones.
        elements: bound of a block, see ``blocks``.

    Returns:
        Mean over the rows in nats, and the masks as ``selections`` gives them.
    """
    tensors = (index.q.float(), index.k.float(), index.weights.float())
    with torch.autocast(q.device.type, enabled=False):
        loss, *masks = _IndexLoss.apply(*tensors, q.detach(), k.detach(), scaling, topk, elements)
    return loss, masks


@torch.no_grad()
def index_recall(
    index: IndexRows, q: Tensor, k: Tensor, scaling: float, topk: int, rows: Tensor
) -> Tensor:
    """[2] fp32: attention mass of the top-k of the index, and of the best k tokens.

    Args:
        q, k: [B, H, n, d], queries and keys of the attention.
        rows: [Q], the positions of the rows to look at; means are taken over them.
    """
    tokens = k.shape[2]
    visible = causal(rows, tokens)
    scores = index_scores(index.q[:, rows], index.k, index.weights[:, rows])
    mass = attention_mass(q[:, :, rows], k, visible, scaling)
    chosen = scores.masked_fill(~visible, float("-inf")).topk(min(topk, tokens)).indices
    held = mass.gather(-1, chosen).sum(-1).mean()
    return torch.stack([held, mass.topk(min(topk, tokens)).values.sum(-1).mean()])
