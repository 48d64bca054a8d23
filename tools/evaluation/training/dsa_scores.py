"""Scores of a trained DSA model: the same questions with dense and with sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from dsa_model import dsa_layers
from dsa_stages import recall
from retrieval_batches import BatchMaker
from retrieval_loop import say
from retrieval_model import causal_logits
from retrieval_scores import Plan, answer_hits, score_many, score_prompts
from transformers import DeepseekV32ForCausalLM

from topkv_evaluation.retrieval import standard_library_text

METHOD = (
    "Greedy: one forward pass over the document with the right answers in place. An answer counts"
    " when all its digits are the most likely byte at their place, which is the same as decoding"
    " it greedily. 'many' plants a fact and a question for every 160 bytes; 'prompts' plants a"
    " few facts in all and asks one question at the end. Every line is given the same documents,"
    " of text held out from training. Sparse attention is that of prompt and answer, in every"
    " layer. 'index' is the share of the attention mass that the selected tokens hold in the"
    " second half of a document, 'best' that of the best selection of the same size, means over"
    " layers."
)
DSA_PLAN = Plan((2048, 8192), 1000, 200, 20, 256, 65536)
DSA_TINY_PLAN = Plan((192, 384), 8, 4, 2, 16, 768)


@torch.no_grad()
def own_forward(
    model: DeepseekV32ForCausalLM, seed: int, length: int, rows: int
) -> dict[str, Any]:
    """Score the model's own ``forward``, and how often its likeliest byte is ours."""
    batch = BatchMaker(standard_library_text("held_out"), model.device, seed)(rows, length)
    own = model(batch.tokens, use_cache=False).logits
    ours = causal_logits(model, batch.tokens, dsa_layers(model, model.config.index_topk))
    return {
        "length": length,
        "rows": rows,
        "exact": answer_hits(own, batch.tokens, batch.answers).double().mean().item(),
        "same_byte": (own.argmax(-1) == ours.argmax(-1)).double().mean().item(),
    }


def evaluate_dsa(
    model: DeepseekV32ForCausalLM, seed: int, plan: Plan, topks: tuple[int, ...]
) -> dict[str, Any]:
    """Score dense attention and each k, and print scores; ``seed`` is of the training."""
    held_out = standard_library_text("held_out")
    rows = []
    for length in plan.lengths:
        for topk in (None, *topks):
            layers = dsa_layers(model, topk)
            # A new maker for each line: all lines get the same documents.
            maker = BatchMaker(held_out, model.device, seed + 1)
            row: dict[str, Any] = {"length": length, "topk": topk}
            row["many"] = score_many(model, maker, length, plan, layers)
            row["prompts"] = score_prompts(model, held_out, length, plan, layers)
            if topk is not None:
                batch = BatchMaker(held_out, model.device, seed + 2)(2, length)
                row["masses"], _ = recall(model, batch, topk, topk)
            rows.append(row)
            name = "dense" if topk is None else f"top-{topk}"
            say(
                f"{length:7d}  {name:8}  exact {row['many']['exact']:.1%} of many,"
                f" {row['prompts']['exact']:.1%} of prompts"
            )
    own = own_forward(model, seed + 3, plan.lengths[0], 4)
    return {"method": METHOD, "rows": rows, "own_forward": own}
