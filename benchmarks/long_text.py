"""Likelihood, under dense attention, of long text that a model samples with sparse attention.

    python benchmarks/long_text.py --out long_text.jsonl
    python benchmarks/long_text.py --compare long_text.jsonl

``topkv eval`` gives a model the right text, token by token; here it goes on with its own, so that
errors may add up. SmolLM2 reads windows of four kinds of text with dense attention and samples
``--tokens`` behind each, at temperature 1 and from the whole vocabulary, by each algorithm and by
dense attention (``dense``). Dense attention then reads all of it once. ``nll`` is the mean
negative log-likelihood of the sampled tokens in nats, ``quarters`` that of each quarter of the
text, and ``texts`` that of each window. A model that goes astray samples tokens of low likelihood.
``--compare`` measures nothing: it prints the difference of each row from ``dense``, window by
window, with a 95 % interval over windows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import topkv
from topkv.plugins import registry
from topkv_evaluation import smollm2
from topkv_evaluation.eval.choices import read_algorithms, split_algorithms
from topkv_evaluation.eval.intervals import spread
from topkv_evaluation.tasks.splits import REPORTING
from topkv_evaluation.tasks.texts import KINDS, text_of, windows

Row = dict[str, Any]
ALGORITHMS = (
    "dense,exact,double_sparsity,ds_p95w2@double_sparsity:stages=top_p/p=0.95/widen=2,"
    "pariskv,pqcache,quest,quest_8i@quest:unit=8,metadata=int8,streaming_llm"
)


def prompts_of(tokenizer: Any, length: int, behind: int, count: int) -> Tensor:
    """``count`` windows of each kind of text, one after the other; ``[KINDS * count, length]``."""
    found = []
    for kind in KINDS:
        ids = tokenizer(text_of(kind), return_tensors="pt").input_ids[0]
        begins = windows(len(ids), length, behind, count, REPORTING)
        found += [ids[begin : begin + length] for begin in begins]
    return torch.stack(found)


@torch.no_grad()
def likelihood(model: Any, texts: Tensor, begin: int) -> Tensor:
    """Negative log-likelihood of what stands behind ``begin`` tokens; ``[N, tokens]`` in nats."""
    return torch.stack(
        [
            cross_entropy(
                model(text[None, :-1], use_cache=False).logits[0, begin - 1 :].float(),
                text[begin:],
                reduction="none",
            )
            for text in texts
        ]
    )


def row_of(model: Any, prompts: Tensor, tokens: int, seed: int) -> Row:
    """Sample behind all prompts at once; ``sampled`` holds prompts and what came behind them."""
    torch.manual_seed(seed)
    begun = perf_counter()
    texts = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return {"sampled": texts, "seconds": round(perf_counter() - begun, 1)}


def measure(options: argparse.Namespace, name: str) -> Row:
    """The row of an algorithm, or of ``dense``."""
    folder = smollm2.folder()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = AutoModelForCausalLM.from_pretrained
    model = load(folder).to(device).eval()
    prompts = prompts_of(
        AutoTokenizer.from_pretrained(folder), options.prompt, options.tokens, options.texts
    ).to(device)
    whole = options.prompt + options.tokens
    if name == "dense":
        row = row_of(model, prompts, options.tokens, options.seed)
    else:
        (choice,) = read_algorithms([name], model.config.head_dim, registry())
        settings = {
            "algorithm": choice.name,
            "params": dict(choice.params),
            **choice.settings,
            "unit": choice.unit,
            "budget": options.budget,
            "buffer": choice.buffer(options.budget, whole + 64),
            "backend": "triton_attention",
            "dense_layers": [],
            "max_requests": len(prompts),
            "max_tokens": len(prompts) * (whole + 64),
            "max_request_tokens": whole + 64,
        }
        with topkv.attach(model, settings):
            row = row_of(model, prompts, options.tokens, options.seed)
        name = choice.label
    found = likelihood(load(folder).to(device).eval(), row.pop("sampled"), options.prompt)
    quarters = found.view(len(prompts), 4, -1).mean(2)
    return {
        "algorithm": name,
        **row,
        "nll": fmean(quarters.flatten().tolist()),
        "quarters": [round(each, 4) for each in quarters.mean(0).tolist()],
        "texts": [round(each, 4) for each in quarters.mean(1).tolist()],
    }


def compared(rows: list[Row]) -> list[Row]:
    """Differences of ``nll`` from that of dense attention, ``more``, and their intervals."""
    (dense,) = (row for row in rows if row["algorithm"] == "dense")
    found = []
    for row in rows:
        more = [a - b for a, b in zip(row["texts"], dense["texts"], strict=True)]
        found.append({"algorithm": row["algorithm"], **spread("more", [*enumerate(more)])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--algorithms", default=ALGORITHMS, help="as topkv eval takes them, or dense"
    )
    parser.add_argument("--budget", type=int, default=208, help="tokens")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="sampled behind it, 4 N")
    parser.add_argument("--texts", type=int, default=4, help="windows of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--compare", type=Path, help="rows that were measured before")
    options = parser.parse_args()
    if options.compare:
        rows = [json.loads(line) for line in options.compare.read_text("utf-8").splitlines()]
        print("\n".join(json.dumps(row) for row in compared(rows)))
        return
    for name in split_algorithms(options.algorithms):
        row = {"budget": options.budget, "seed": options.seed, **measure(options, name)}
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
