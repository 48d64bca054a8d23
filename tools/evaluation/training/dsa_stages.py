"""The three stages of training a DSA model: their steps and schedules.

DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.1, has the last two; there the dense model was
trained before. Rates and lengths are those of a small model on one GPU, not the report's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from dsa_model import (
    DsaLayer,
    dsa_layers,
    index_parameters,
    mean_loss,
    other_parameters,
    set_learning,
)
from retrieval_batches import Batch, BatchMaker
from retrieval_loop import Row, adamw, set_rate, update
from retrieval_model import Layers, causal_logits
from retrieval_schedule import Schedule, Stage
from retrieval_scores import answer_hits
from torch import Tensor
from train_retrieval import losses, step
from transformers import DeepseekV32ForCausalLM

TRAINED = ("dense", "warm-up", "sparse")
COLUMNS = ("text_nats", "answer_nats", "exact", "index_kl")
"""Columns of a step's report; in the dense stage the last one is missing."""
INDEX_RATE = 3.0
"""Learning rate of the indexer in the sparse stage, as a multiple of that of the model."""

SCHEDULES = {
    "dense": Schedule((Stage(512, 256, 0.35), Stage(2048, 64, 0.35), Stage(8192, 16, 0.30))),
    # The divergence looks at every pair of tokens: a step of 8192 has four times those of 2048.
    "warm-up": Schedule((Stage(2048, 16, 0.5), Stage(8192, 4, 0.5)), peak=2e-3, warmup=0.05),
    "sparse": Schedule((Stage(2048, 16, 0.4), Stage(8192, 4, 0.6)), peak=3e-4, warmup=0.05),
}
TINY_SCHEDULES = {
    "dense": Schedule((Stage(96, 8, 0.5), Stage(192, 4, 0.5))),
    "warm-up": Schedule((Stage(96, 4, 0.5), Stage(192, 2, 0.5))),
    "sparse": Schedule((Stage(96, 4, 0.5), Stage(192, 2, 0.5)), peak=3e-4),
}
Take = Callable[[Batch, float], Tensor]


def warm_up_step(
    model: DeepseekV32ForCausalLM,
    optimizer: torch.optim.AdamW,
    batch: Batch,
    layers: Sequence[DsaLayer],
) -> Tensor:
    """One update of the indexers alone; [4] as ``COLUMNS``, the first three of dense attention."""
    _, report = losses(model, batch, layers)
    loss = mean_loss(layers)
    loss.backward()
    update(optimizer)
    return torch.cat([report, loss.detach()[None]])


def sparse_step(
    model: DeepseekV32ForCausalLM,
    optimizers: Sequence[torch.optim.AdamW],
    batch: Batch,
    layers: Sequence[DsaLayer],
) -> Tensor:
    """One update of all: of the model by the loss of its bytes, of the indexers by theirs.

    One backward pass serves both, because neither loss reaches the other's parameters. Each
    optimizer clips its own gradients.
    """
    language, report = losses(model, batch, layers)
    loss = mean_loss(layers)
    (language + loss).backward()
    for optimizer in optimizers:
        update(optimizer)
    return torch.cat([report, loss.detach()[None]])


def prepare(
    name: str, model: DeepseekV32ForCausalLM, topk: int, dense: Layers | None = None
) -> Take:
    """Set the parameters that a stage trains, and return its step for ``follow``.

    Args:
        dense: compiled layers for the dense stage, else its own.

    Raises:
        ValueError: there is no such stage.
    """
    if name not in TRAINED:
        raise ValueError(f"a stage is one of {', '.join(TRAINED)}, got {name!r}")
    set_learning(model, index=name != "dense", others=name != "warm-up")
    main, index = adamw(other_parameters(model), 0.0), adamw(index_parameters(model), 0.0)
    if name == "dense":
        layers = dsa_layers(model) if dense is None else dense

        def take_dense(batch: Batch, rate: float) -> Tensor:
            set_rate(main, rate)
            return step(model, main, batch, layers)

        return take_dense

    learning = dsa_layers(model, None if name == "warm-up" else topk, learn=True)

    def take_warm_up(batch: Batch, rate: float) -> Tensor:
        set_rate(index, rate)
        return warm_up_step(model, index, batch, learning)

    def take_sparse(batch: Batch, rate: float) -> Tensor:
        set_rate(main, rate)
        set_rate(index, INDEX_RATE * rate)
        return sparse_step(model, (main, index), batch, learning)

    return take_warm_up if name == "warm-up" else take_sparse


@torch.no_grad()
def recall(
    model: DeepseekV32ForCausalLM, batch: Batch, attended: int | None, topk: int
) -> tuple[list[list[float]], float]:
    """Measure the attention mass of the index and of the best tokens, and exact answers.

    Args:
        attended: tokens of a row in this pass, chosen by the index; None for all.
        topk: tokens of the selection that is measured.

    Returns:
        [held, best] of each layer, and the share of exact answers of the pass.
    """
    layers = dsa_layers(model, attended, measure=topk)
    device = batch.tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = causal_logits(model, batch.tokens, layers)
    exact = answer_hits(logits, batch.tokens, batch.answers).double().mean().item()
    return torch.stack([layer.recall for layer in layers]).tolist(), exact


def observer(
    name: str, model: DeepseekV32ForCausalLM, maker: BatchMaker, topk: int, tokens: int
) -> Callable[[int], Row]:
    """Return a function of further columns of the curve, on text held out from training.

    ``index_mass`` and ``best_mass`` are means over layers and late rows, in the attention that
    the stage trains (dense before the sparse stage); ``sparse_exact`` is always of the top-k.

    Args:
        tokens: tokens of a batch to look at.
    """

    def observe(length: int) -> Row:
        batch = maker(max(1, tokens // length), length)
        masses, exact = recall(model, batch, topk, topk)
        if name != "sparse":
            masses, _ = recall(model, batch, None, topk)
        held, best = (sum(column) / len(masses) for column in zip(*masses, strict=True))
        return {"index_mass": held, "best_mass": best, "sparse_exact": exact} | {
            "index_recall": held / best
        }

    return observe
