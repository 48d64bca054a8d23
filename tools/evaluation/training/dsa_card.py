"""The model card of a DSA checkpoint, written from the record and the curve of its training.

python tools/evaluation/training/dsa_card.py CHECKPOINT_FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_card import table

_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [byte-level, long-context, retrieval, sparse-attention]
---

# A small DeepSeek-V3.2 whose indexer is trained

A byte-level `DeepseekV32ForCausalLM` of {parameters:.2f} million parameters and {layers} layers,
without experts. Its lightning indexer selects {topk} tokens for each row; it answers questions
about facts far back in its context. It exists to try DeepSeek Sparse Attention with an indexer
that was trained. It is no language model for use: it knows one text and one kind of question.

## How to ask

The text is anything in ASCII; one token is one byte. Facts and the question have a fixed form,
keys are four lowercase letters, values five digits:

```
# fact: key qzkv is 48213.

# ask: key qzkv is\x20
```

Both begin with a line feed, a fact also ends with one. The next five bytes are the answer.
`topkv_evaluation.retrieval.make_prompt` makes such prompts; the model has {positions} positions.
There is no end-of-text token: generate five tokens. The padding token is byte 0.

## How it was made

Text: the sources of the standard library of Python {python} ({text_mb:.1f} MB for training, other
files held out), with a fact and its question in random places for every 160 bytes. {optimizer},
betas {betas}, weight decay {decay} on matrices, gradient clipped at norm {clip:g}, cosine after a
linear rise, bfloat16 autocast over fp32 weights but for the indexer, which is fp32. Stages, after
section 2.1.1 of DeepSeek's report on V3.2: dense attention and the loss of bytes and answers, the
indexer unused; the indexer alone, KL from the attention summed over heads; both, the model through
the indexer's top-{topk}, the KL over the selected tokens, neither loss reaching the other's
parameters (the indexer at {index_rate:g} times the model's rate). On one {device}, torch {torch},
transformers {transformers}:

{stages}

Values are those of the last line of each stage in `curve.jsonl`: "exact" and "KL" of its training
steps, the others of text held out. "index" is the share of the attention mass that the index
top-{topk} hold in the second half of a document, "best" that of the best {topk} tokens; in the
first two stages that of dense attention.

```
PYTHONPATH=core/src:plugins/transformers/src:tools/evaluation/src \\
    python tools/evaluation/training/{command}
```

The schedule follows the clock, so another machine gives other weights.

## What it scores

{method}

Weights as saved (bfloat16).

{scores}

The model's own `forward` in Transformers, {own_rows} documents of {own_length} tokens:
{own_exact:.1%} exact; its likeliest byte is that of the blocked attention used above at
{own_same:.1%} of all places.
"""


def _stages(record: Mapping[str, Any], curve: list[dict[str, Any]]) -> str:
    rows = []
    for name, stage in record["stages"].items():
        shapes = record["settings"]["schedules"][name]
        sizes = ", ".join(f"{s['rows']} x {s['length']}" for s in shapes["stages"])
        last = [point for point in curve if point["stage"] == name][-1]
        kl = f"{last['index_kl']:.3f}" if "index_kl" in last else "-"
        rows.append(
            [
                *(name, f"{stage['steps']}", f"{stage['seconds']:.0f}", sizes),
                *(f"{shapes['peak']:g}", f"{last['exact']:.1%}", kl),
                *(f"{last['index_mass']:.1%}", f"{last['best_mass']:.1%}"),
                f"{last['sparse_exact']:.1%}",
            ]
        )
    header = ["stage", "steps", "seconds", "sequences x tokens a step", "peak rate", "exact"]
    header += ["KL, nats", "index", "best", "exact, sparse"]
    return table(header, rows)


def _scores(record: Mapping[str, Any]) -> str:
    rows = []
    for row in record["scores"]["rows"]:
        many, prompts = row["many"], row["prompts"]
        asked = prompts["questions"]
        masses = row.get("masses")
        held, best = (
            ("-", "-")
            if masses is None
            else (f"{sum(column) / len(masses):.1%}" for column in zip(*masses, strict=True))
        )
        rows.append(
            [
                f"{row['length']}",
                "dense" if row["topk"] is None else f"top-{row['topk']}",
                f"{many['exact']:.1%} ({many['facts']} facts, {many['questions']} questions)",
                f"{prompts['exact']:.1%} ({prompts['facts']} facts, {asked} prompts)",
                f"{many['nats_per_plain_byte']:.3f}",
                *(held, best),
            ]
        )
    header = ["tokens", "attention", "exact, many", "exact, prompts", "nats per plain byte"]
    return table([*header, "index", "best"], rows)


def write_dsa_card(folder: Path) -> str:
    """Return the card as Markdown; all figures are from ``training.json`` and the curve.

    Raises:
        KeyError: the record lacks something, scores for instance when the run was cut short.
    """
    record = json.loads((folder / "training.json").read_text())
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    settings, own = record["settings"], record["scores"]["own_forward"]
    return _CARD.format(
        **record["versions"],
        parameters=settings["parameters"] / 1e6,
        positions=json.loads((folder / "config.json").read_text())["max_position_embeddings"],
        layers=settings["layers"],
        topk=settings["topk"],
        text_mb=settings["text_bytes"] / 1e6,
        optimizer=settings["optimizer"],
        betas=" and ".join(str(beta) for beta in settings["betas"]),
        decay=settings["weight_decay"],
        clip=settings["gradient_clip"],
        index_rate=settings["index_rate"],
        command=settings["command"],
        stages=_stages(record, curve),
        method=record["scores"]["method"],
        scores=_scores(record),
        own_rows=own["rows"],
        own_length=own["length"],
        own_exact=own["exact"],
        own_same=own["same_byte"],
    )


def main(folder: Path) -> None:
    (folder / "README.md").write_text(write_dsa_card(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
