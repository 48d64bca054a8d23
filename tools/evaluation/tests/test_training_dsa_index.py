"""Scores, target, selection and loss of the indexer in the recipe, against plain sums."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture(scope="module")
def dsa() -> ModuleType:
    sys.path.insert(0, str(TRAINING))
    try:
        return import_module("dsa_index")
    finally:
        sys.path.remove(str(TRAINING))


def rows_of(dsa: ModuleType, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """Random index rows and queries and keys for ``shape`` = batch, tokens, heads, dim."""
    batch, tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    index = (normal(batch, tokens, heads, dim), normal(batch, tokens, dim))
    index = dsa.IndexRows(*index, normal(batch, tokens, heads))
    return index, normal(batch, heads, tokens, dim), normal(batch, heads, tokens, dim)


def plain_loss(index: Any, q: Tensor, k: Tensor, scaling: float, topk: int | None) -> Tensor:
    """Row by row and head by head: the mean of KL(p || softmax(I)) over each row's tokens."""
    total = q.new_zeros(())
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            scores = torch.stack(
                [
                    sum(
                        index.weights[b, t, j] * (index.q[b, t, j] @ index.k[b, s]).clamp(min=0)
                        for j in range(index.weights.shape[2])
                    )
                    for s in range(t + 1)
                ]
            )
            chosen = torch.arange(t + 1)
            if topk is not None:
                chosen = scores.detach().argsort(descending=True)[:topk]
            p = q.new_zeros(len(chosen))
            for h in range(q.shape[1]):
                p = p + ((k[b, h, chosen] @ q[b, h, t]) * scaling).softmax(0)
            p = (p / p.sum()).detach()
            log_share = scores[chosen] - scores[chosen].logsumexp(0)
            total = total + (p * (p.log() - log_share)).sum()
    return total / (q.shape[0] * q.shape[2])


@pytest.mark.parametrize("topk", [None, 5])
@pytest.mark.parametrize("elements", [1, 2 * 3 * 12 * 5, 1 << 20])
def test_blockwise_loss_and_gradient_are_the_plain_ones(
    dsa: ModuleType, topk: int | None, elements: int
) -> None:
    index, q, k = rows_of(dsa, 2, 12, 3, 4, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (index.q, index.k, index.weights)]
    truth = plain_loss(dsa.IndexRows(*leaves), q, k, 0.7, topk)
    expected = torch.autograd.grad(3 * truth, leaves)
    ours = [t.clone().requires_grad_() for t in leaves]
    loss, _ = dsa.index_loss(dsa.IndexRows(*ours), q, k, 0.7, topk, elements)
    found = torch.autograd.grad(3 * loss, ours)
    # Ours is computed in fp32, whose roundings are the tolerance.
    assert torch.allclose(loss.double(), truth, rtol=1e-5, atol=0)
    for gradient, right in zip(found, expected, strict=True):
        assert torch.allclose(gradient, right, rtol=1e-4, atol=1e-6 * right.abs().max().item())


def test_loss_is_nil_where_the_scores_are_the_target(dsa: ModuleType) -> None:
    """One head that scores what attention scores: softmax of the products, minus a constant."""
    index, q, k = rows_of(dsa, 1, 16, 1, 4)
    # relu(x) - relu(-x) = x: two index heads with weights 1 and -1 pass products through.
    pair = torch.cat((q.transpose(1, 2), -q.transpose(1, 2)), dim=2)
    weights = torch.tensor([0.5, -0.5]).expand(1, 16, 2)
    same = dsa.IndexRows(pair, k[:, 0], weights)
    assert dsa.index_loss(same, q, k, 0.5, None)[0].abs() < 1e-6
    assert dsa.index_loss(index, q, k, 0.5, None)[0] > 0.01


def test_memory_of_the_loss_is_bounded(dsa: ModuleType) -> None:
    """No tensor that a pass makes is larger than a block, masks and inputs aside."""

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and tensor.dtype != torch.bool:
                    Largest.seen = max(Largest.seen, tensor.numel())
            return out

    index, q, k = rows_of(dsa, 1, 256, 2, 4)
    leaves = [t.requires_grad_() for t in (index.q, index.k, index.weights)]
    bound = 2 * 256 * 16
    for topk in (None, 32):
        with Largest():
            loss, masks = dsa.index_loss(dsa.IndexRows(*leaves), q, k, 0.5, topk, bound)
            loss.backward()
        assert Largest.seen <= bound < 2 * 256 * 256
        assert [mask.shape[1] for mask in masks] == [16] * 16


def test_recall_is_that_of_a_sort(dsa: ModuleType) -> None:
    index, q, k = rows_of(dsa, 2, 24, 8, 4)
    rows = torch.tensor([3, 11, 23])
    held, best = dsa.index_recall(index, q, k, 0.5, 6, rows).tolist()
    right: list[list[float]] = [[], []]
    for b in range(2):
        for t in rows.tolist():
            p = torch.stack([(k[b, h, : t + 1] @ q[b, h, t] * 0.5).softmax(0) for h in range(8)])
            scores = index.k[b, : t + 1] @ index.q[b, t].T
            order = (scores.clamp(min=0) @ index.weights[b, t]).argsort(descending=True)
            right[0].append(p.mean(0)[order[:6]].sum().item())
            right[1].append(p.mean(0).sort(descending=True).values[:6].sum().item())
    assert held == pytest.approx(sum(right[0]) / 6, rel=1e-5)
    assert best == pytest.approx(sum(right[1]) / 6, rel=1e-5)
