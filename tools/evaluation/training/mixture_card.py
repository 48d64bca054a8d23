"""``python mixture_card.py DIR``: the model card, from ``training.json`` alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_card import table

_MODELS = {"llama": "Llama", "minimax_m3_vl_text": "MiniMax-M3 without experts and indexes"}

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [byte-level, long-context, retrieval]
---

# A small model of the mixture of tasks ({shape})

A byte-level {model} of {size:.2f} million parameters: {layers} layers, {heads} query heads and
{kv_heads} kv-heads of {head_dim} channels. It answers the questions of `topkv eval` about its
context: planted facts, RULER's needles and variables, keys that differ by a letter, walks. It
exists to try sparse attention and is no language model for use.

One token is one byte; there is no end-of-text token, and the padding token is byte 0. Prompts are
those of `topkv eval`.

## How it was made

Documents are drawn anew for every step: {kinds}. Filler is the standard library of Python
{python}, prose its help texts; the held-out part of the library and the haystack of the tasks are
not read. Loss: mean cross-entropy of all bytes plus that of the answers, each document's alike.
AdamW, peak rate {peak:g}, betas 0.9 and 0.95, weight decay 0.1 on matrices, gradient clipped at
norm 1, {warmup} steps of warm-up and a cosine; {begun}; bfloat16 autocast over fp32 weights on a
GPU. {steps} steps, {tokens:.2f} billion tokens, {seconds:.0f} seconds on {device}, torch {torch},
transformers {transformers}, seed {seed}.

{stages}

The schedule counts steps, not time, and the batch of a step is a function of its number and the
seed. Another kind of device rounds differently and gives other weights.
`curve.jsonl` has the loss and, by kind of document, the share of right bytes of answers.

    {command}

## What it scores

{method}

{scores}
"""


def write_card(record: Mapping[str, Any]) -> str:
    """Return the card as Markdown; every figure comes from ``record``, the ``training.json``."""
    config, plan = record["config"], record["plan"]
    stages = [
        [f"{s['length']}", f"{s['rows']}", f"{s['steps']}",
         ", ".join(f"{kind} {weight}" for kind, weight in s["weights"].items())]
        for s in plan["stages"]
    ]  # fmt: skip
    lengths = sorted({row["length"] for row in record["scores"]})
    held = {(row["task"], row["length"]): row for row in record["scores"]}
    words = dict.fromkeys(row["task"] for row in record["scores"])
    rows = [[word, *(f"{held[word, n]['right']:.1%}" for n in lengths)] for word in words]
    asked = record["scores"][0]["questions"] if rows else 0
    kinds = dict.fromkeys(kind for stage in plan["stages"] for kind in stage["weights"])
    return _CARD.format(
        **record["versions"],
        shape=record["shape"],
        model=_MODELS[config["model_type"]],
        size=record["parameters"] / 1e6,
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        begun=_begun(record),
        kinds=", ".join(kinds),
        peak=plan["peak"],
        warmup=plan["warmup"],
        seed=plan["seed"],
        steps=record["steps"],
        tokens=record["tokens"] / 1e9,
        seconds=record["seconds"],
        stages=table(["bytes", "documents a step", "steps", "mixture"], stages),
        command=record["command"],
        method=f"{record['method']} {asked} questions each.",
        scores=table(["right answers", *(f"{length} tokens" for length in lengths)], rows),
    )


def _begun(record: Mapping[str, Any]) -> str:
    taken = record["weights"]
    if taken is None:
        return f"weights drawn with a deviation of {record['config']['initializer_range']:g}"
    return f"weights begun from those of the checkpoint with the checksum {taken[:16]}"


def main(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text())
    (folder / "README.md").write_text(write_card(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
