"""The model card of the shipped checkpoint, written from the record of its training.

    python tools/evaluation/training/model_card.py CHECKPOINT_FOLDER

rewrites the folder's ``README.md`` from its ``training.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [byte-level, long-context, retrieval]
---

# A small model whose attention means something

A byte-level Llama of {parameters:.2f} million parameters that answers questions about facts far
back in its context. It exists to try sparse attention: whether an answer comes out right depends
on whether the selection holds the fact, which random weights cannot show.

It is no language model for use: it knows one text and one kind of question.

## How to ask

The text is anything in ASCII; one token is one byte. Facts and the question have a fixed form,
keys are four lowercase letters, values five digits:

```
# fact: key qzkv is 48213.

# ask: key qzkv is\x20
```

Both begin with a line feed, a fact also ends with one. The next five bytes are the answer.
`topkv_evaluation.retrieval.make_prompt` makes such prompts of any length. There is no
end-of-text token: generate five tokens. The padding token is byte 0.

## How it was made

Text: the sources of the standard library of Python {python} ({text_mb:.1f} MB for training, other
files held out), with a fact and its question in random places for every 160 bytes. Loss: mean
cross-entropy of all bytes plus mean cross-entropy of the digits of the answers. {optimizer}, peak
rate {peak:g}, betas {betas}, weight decay {decay} on matrices, gradient clipped at norm {clip:g},
cosine after a warm-up of {warmup:.0%} of the time, bfloat16 autocast over fp32 weights.
{steps} steps in {seconds:.0f} seconds on one {device}, torch {torch}, transformers {transformers}:

{stages}

```
PYTHONPATH=tools/evaluation/src python tools/evaluation/training/{command}
```

The schedule follows the clock, so another machine gives other weights.

## What it scores

{method}

Weights as saved (bfloat16).

{scores}

Text it was trained on, at {known_length} tokens: {known_exact:.1%} exact with {known_facts} facts,
{known_plain:.3f} nats per plain byte.

Nats per byte: "all" counts every byte, random keys and values of facts included; "plain" counts
the text between the statements alone.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _stages(record: Mapping[str, Any]) -> str:
    rows = []
    for stage in record["settings"]["schedule"]["stages"]:
        points = [point for point in record["curve"] if point["length"] == stage["length"]]
        last = f"{points[-1]['exact']:.1%}" if points else "-"
        rows.append([f"{stage['length']}", f"{stage['rows']}", f"{stage['share']:.0%}", last])
    return table(["tokens", "sequences a step", "time", "exact answers at its end"], rows)


def _scores(record: Mapping[str, Any]) -> str:
    scores = record["scores"]
    rows = []
    for many, prompt in zip(scores["many"], scores["prompts"], strict=True):
        rows.append(
            [
                f"{many['length']}",
                f"{many['exact']:.1%} ({many['facts']} facts, {many['questions']} questions)",
                f"{prompt['exact']:.1%} ({prompt['facts']} facts, {prompt['questions']} prompts)",
                f"{many['nats_per_byte']:.3f}",
                f"{many['nats_per_plain_byte']:.3f}",
            ]
        )
    header = ["tokens", "exact, many", "exact, prompts", "nats per byte, all", "plain"]
    return table(header, rows)


def write_model_card(record: Mapping[str, Any]) -> str:
    """Return the card as Markdown; every figure comes from ``record``, the ``training.json``.

    Raises:
        KeyError: the record lacks something, scores for instance when the run was cut short.
    """
    settings, known = record["settings"], record["scores"]["training_text"]
    return _CARD.format(
        **record["versions"],
        parameters=settings["parameters"] / 1e6,
        text_mb=settings["text_bytes"] / 1e6,
        optimizer=settings["optimizer"],
        peak=settings["schedule"]["peak"],
        warmup=settings["schedule"]["warmup"],
        betas=" and ".join(str(beta) for beta in settings["betas"]),
        decay=settings["weight_decay"],
        clip=settings["gradient_clip"],
        steps=record["steps"],
        seconds=record["seconds"],
        stages=_stages(record),
        command=settings["command"],
        method=record["scores"]["method"],
        scores=_scores(record),
        known_length=known["length"],
        known_exact=known["exact"],
        known_facts=known["facts"],
        known_plain=known["nats_per_plain_byte"],
    )


def main(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text())
    (folder / "README.md").write_text(write_model_card(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
