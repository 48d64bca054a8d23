"""Scores of a trained model: exact answers by length, loss of the text in nats per byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from retrieval_batches import BatchMaker
from retrieval_model import Layers, causal_logits
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from topkv_evaluation.retrieval import VALUE_DIGITS, make_prompt, standard_library_text

METHOD = (
    "Dense attention, greedy: one forward pass over the document with the right answers in place."
    " An answer counts when all its digits are the most likely byte at their place, which is the"
    " same as decoding it greedily. 'many' plants a fact and a question for every 160 bytes;"
    " 'prompts' plants a few facts in all and asks one question at the end. The text is held out"
    " from training; keys and values are random."
)


@dataclass(frozen=True)
class Plan:
    """Plan of an evaluation.

    Attributes:
        lengths: tokens of the documents.
        many: questions at each length in documents full of facts.
        prompts: prompts at each length with one question at the end.
        facts: facts planted in each of these prompts.
        sinks: tokens at their start that stay free of facts.
        tokens_at_once: most tokens of a forward pass.
    """

    lengths: tuple[int, ...]
    many: int
    prompts: int
    facts: int
    sinks: int
    tokens_at_once: int


PLAN = Plan((4096, 8192, 16384, 32768), 1000, 200, 20, 256, 131072)
TINY_PLAN = Plan((192, 384), 8, 4, 2, 16, 768)


def nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return cross-entropy [B, n - 1] in fp32: entry i is of token i + 1 given those before it."""
    rows, length = tokens.shape
    flat = cross_entropy(
        logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten(), reduction="none"
    )
    return flat.view(rows, length)[:, :-1]


def answer_hits(logits: Tensor, tokens: Tensor, answers: Tensor) -> Tensor:
    """Return which answers are the greedy ones.

    Args:
        logits: [B, n, vocab].
        tokens: [B, n], the right answers in place.
        answers: [B, pairs, 5], positions of the digits.

    Returns:
        [B, pairs] bool.
    """
    before = (answers - 1).flatten(1)[..., None].expand(-1, -1, logits.shape[-1])
    chosen = logits.gather(1, before).argmax(-1)
    right = chosen == tokens.gather(1, answers.flatten(1))
    return right.view(answers.shape).all(-1)


@torch.inference_mode()
def score_many(
    model: PreTrainedModel,
    maker: BatchMaker,
    length: int,
    plan: Plan,
    layers: Layers | None = None,
) -> dict[str, Any]:
    """Score answers to a question for every 160 bytes, and the loss of bytes, at ``length``."""
    rows = max(1, plan.tokens_at_once // length)
    hits: list[Tensor] = []
    losses: list[Tensor] = []
    plain_losses: list[Tensor] = []
    pairs = asked = 0
    while asked < plan.many:
        batch = maker(rows, length)
        logits = causal_logits(model, batch.tokens, layers)
        loss = nats(logits, batch.tokens)
        losses.append(loss.mean())
        plain_losses.append(loss[batch.plain[:, 1:]].mean())
        hits.append(answer_hits(logits, batch.tokens, batch.answers).flatten())
        pairs = batch.answers.shape[1]
        asked += rows * pairs
    return {
        "length": length,
        "questions": asked,
        "facts": pairs,
        "exact": torch.cat(hits).double().mean().item(),
        "nats_per_byte": torch.stack(losses).mean().item(),
        "nats_per_plain_byte": torch.stack(plain_losses).mean().item(),
    }


@torch.inference_mode()
def score_prompts(
    model: PreTrainedModel,
    text: np.ndarray,
    length: int,
    plan: Plan,
    layers: Layers | None = None,
) -> dict[str, Any]:
    """Score exact answers to the question at the end of prompts; answers end at ``length``."""
    rows = max(1, plan.tokens_at_once // length)
    hits: list[Tensor] = []
    for first in range(0, plan.prompts, rows):
        documents = [
            make_prompt(length - VALUE_DIGITS, plan.facts, seed, sinks=plan.sinks, text=text)
            for seed in range(first, min(first + rows, plan.prompts))
        ]
        answers = [np.frombuffer(d.expected.encode(), dtype=np.uint8) for d in documents]
        full = [np.concatenate([d.tokens, a]) for d, a in zip(documents, answers, strict=True)]
        tokens = torch.from_numpy(np.stack(full)).long().to(model.device)
        where = torch.arange(length - VALUE_DIGITS, length, device=model.device)
        logits = causal_logits(model, tokens, layers)
        hits.append(answer_hits(logits, tokens, where.expand(len(full), 1, -1)).flatten())
    return {
        "length": length,
        "questions": plan.prompts,
        "facts": plan.facts,
        "exact": torch.cat(hits).double().mean().item(),
    }


def evaluate(model: PreTrainedModel, seed: int, plan: Plan) -> dict[str, Any]:
    """Score a model, and print scores as a table; ``seed`` is that of its training."""
    held_out = standard_library_text("held_out")
    maker = BatchMaker(held_out, model.device, seed + 1)
    seen = BatchMaker(standard_library_text("train"), model.device, seed + 2)
    many, prompts = [], []
    print(" length   exact, many (facts)   exact, prompts (facts)   nats/byte all   plain")
    for length in plan.lengths:
        m = score_many(model, maker, length, plan)
        p = score_prompts(model, held_out, length, plan)
        many.append(m)
        prompts.append(p)
        print(
            f"{length:7d}   {m['exact']:12.1%} ({m['facts']:4d})   {p['exact']:15.1%}"
            f" ({p['facts']:3d})   {m['nats_per_byte']:13.3f} {m['nats_per_plain_byte']:7.3f}",
            flush=True,
        )
    known = score_many(model, seen, plan.lengths[len(plan.lengths) // 2 - 1], plan)
    return {"method": METHOD, "many": many, "prompts": prompts, "training_text": known}
