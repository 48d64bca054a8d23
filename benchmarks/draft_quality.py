"""Drafts that are verified jointly beside exactly: the KL to dense attention of what they answer.

    python benchmarks/draft_quality.py --out benchmarks/results/draft_quality.jsonl

SmolLM2 reads windows of four kinds of text and is then given the right text, ``--queries`` tokens
in a step: the first is certain, each further one a draft. A draft is right with probability
``--accept`` if all before it were; a wrong one, and all behind it, are tokens of another place of
the text, which are rejected. ``kl`` is the mean over kept tokens of the KL of the next token's
distribution to that of dense attention, in nats, with a 95 % interval over windows (``kl_low``,
``kl_high``); ``agree`` the share whose most likely next token is the dense one, which is what a
greedy verification asks; ``misses`` units that a kept token loads, of all layers and heads.
With ``exact`` every number of queries answers alike; a row with one query is without drafts.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from long_text import prompts_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import topkv
from topkv_evaluation import smollm2
from topkv_evaluation.eval.intervals import spread

Row = dict[str, Any]


@torch.no_grad()
def dense_answers(model: Any, texts: Tensor, begin: int) -> Tensor:
    """Log-probabilities of dense attention, fp32 ``[N, tokens, V]``, on the CPU."""
    return torch.stack(
        [model(text[None], use_cache=False).logits[0, begin:].float().log_softmax(-1).cpu()
         for text in texts]
    )  # fmt: skip


@torch.no_grad()
def verified(handle: Any, texts: Tensor, options: argparse.Namespace, queries: int) -> Tensor:
    """Log-probabilities of kept tokens, as ``dense_answers`` has them."""
    model, begin, generator = handle.model, options.prompt, torch.Generator().manual_seed(1)
    cache = handle.new_cache()
    model(texts[:, :begin], past_key_values=cache, logits_to_keep=1)
    cache.state.most = queries
    found, at = [], begin
    while at + queries <= texts.shape[1]:
        right = torch.rand(queries - 1, generator=generator) < options.accept
        kept = 1 + int(right.long().cumprod(0).sum())
        step = texts[:, at : at + queries].clone()
        step[:, kept:] = texts[:, kept - 1 : queries - 1]
        logits = model(step, past_key_values=cache).logits[:, :kept]
        found.append(logits.float().log_softmax(-1).cpu())
        if kept < queries:
            cache.crop(kept - queries)
        at += kept
    return torch.cat(found, 1)


def row_of(
    model: Any, texts: Tensor, dense: Tensor, options: argparse.Namespace, **of: Any
) -> Row:
    """The row of an algorithm, a verification, a number of queries and a budget."""
    settings = {
        "algorithm": of["algorithm"],
        "verification": of["verification"],
        "max_queries": of["queries"],
        "budget": of["budget"],
        "buffer": 2 * of["budget"],
        "backend": "triton_attention",
        "dense_layers": [],
        "max_requests": len(texts),
        "max_tokens": len(texts) * (texts.shape[1] + 64),
        "max_request_tokens": texts.shape[1] + 64,
    }
    with topkv.attach(model, settings) as handle:
        answers = verified(handle, texts, options, of["queries"])
        loaded = handle.coordinator.transfers_of().misses
    truth = dense[:, : answers.shape[1]]
    kl = (truth.exp() * (truth - answers)).sum(-1)
    same = (truth.argmax(-1) == answers.argmax(-1)).float()
    windows = [*enumerate(kl.mean(1).tolist())]
    return {
        **of,
        "accept": options.accept,
        "tokens": kl.numel(),
        **spread("kl", windows),
        "agree": round(same.mean().item(), 4),
        "misses": round(loaded / kl.numel(), 1),
        "windows": [round(each, 4) for _, each in windows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algorithms", nargs="+", default=["quest"])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[112, 160, 224])
    parser.add_argument("--verifications", nargs="+", default=["joint", "exact"])
    parser.add_argument("--accept", type=float, default=1.0)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=3, help="windows of each kind of text")
    options = parser.parse_args()
    folder = smollm2.folder()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    sizes = options.prompt + options.tokens, 0, options.texts
    texts = prompts_of(AutoTokenizer.from_pretrained(folder), *sizes).to(device)
    dense = dense_answers(model, texts, options.prompt)
    cells = product(options.algorithms, options.budgets, options.verifications, options.queries)
    for algorithm, budget, verification, queries in cells:
        of = {"algorithm": algorithm, "budget": budget}
        row = row_of(
            model, texts, dense, options, **of, verification=verification, queries=queries
        )
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print({name: value for name, value in row.items() if name != "windows"}, flush=True)
    print("dense entropy", round(fmean((-dense.exp() * dense).sum(-1).flatten().tolist()), 3))


if __name__ == "__main__":
    main()
