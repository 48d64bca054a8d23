"""Blocks that are left out while questions are answered: ``topkv eval`` with a counter.

    python plugins/skip_softmax/benchmarks/blocks.py --factors 1,100,1000 --budgets 5%,50%

On a CPU, by the reference of ``triton_attention``, whose blocks have 64 keys. Writes a row of JSON
for each factor and budget; ``--out`` keeps what ``topkv eval`` has to say of the answers.
"""

from __future__ import annotations

import json
from collections import Counter

import click

from topkv_evaluation.eval.command import evaluate
from topkv_triton_attention.skip_reference import TILE, SkippingAttend


@click.command()
@click.option("--factors", default="1,100,1000")
@click.option("--budgets", default="5%,50%")
@click.option("--questions", default=20)
@click.option("--contexts", default="4096")
@click.option("--out", required=True, type=click.Path())
def main(factors: str, budgets: str, questions: int, contexts: str, out: str) -> None:
    """Count blocks of all sparse layers, lanes and steps."""
    counts: Counter[str] = Counter()
    skips = SkippingAttend.skips

    def counting(self, q, k, tables):
        found = skips(self, q, k, tables)
        counts["left_out"] += int(found.sum())
        counts["blocks"] += int(((tables.lengths + TILE - 1) // TILE).sum()) * k.shape[1]
        return found

    SkippingAttend.skips = counting
    for budget in budgets.split(","):
        for factor in factors.split(","):
            counts.clear()
            asked = f"factor_{factor}@quest:stages=skip_softmax/factor={factor}"
            options = ["--tasks", "facts", "--impl", "reference", "--dense-layers", "0-1"]
            options += ["--questions", str(questions), "--contexts", contexts]
            options += ["--budgets", budget, "--algorithms", f"quest,{asked}", "--out", out]
            evaluate.main(options, standalone_mode=False)
            row = {"factor": float(factor), "budget": budget, "context": contexts, **counts}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
