"""Comparison of right answers before and after a change, of the same questions.

    python tools/evaluation/scripts/pairs.py BEFORE BEHIND --out FILE

BEFORE and BEHIND are folders of ``grid.py --out``, or several of them under one. Prints a line for
each algorithm, model and budget, over all tasks, and the mean over these with a 95 % interval: of
the tasks, drawn again with replacement 10,000 times, so that what is common to the cells of a task
counts once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from topkv_evaluation.eval.results import RESULTS, Row, read_rows

DRAWS = 10_000
Cell = tuple[str, str, float, str]


def rows_of(folder: Path) -> dict[Cell, dict[str, Row]]:
    """Read rows by algorithm, model, budget in percent and dense layers, and by task."""
    found: dict[Cell, dict[str, Row]] = {}
    for path in sorted(folder.rglob(RESULTS)):
        for row in read_rows(path.parent):
            if row["plugin"] is None or row.get("accuracy") is None:
                continue
            layers = ",".join(map(str, row["dense_layers"]))
            cell = (row["algorithm"], row["model"], row["nominal_percent"], layers)
            found.setdefault(cell, {})[row["family"]] = row
    return found


def pairs(before: dict[Cell, dict[str, Row]], behind: dict[Cell, dict[str, Row]]) -> list[Row]:
    """Make a row for each cell of both, over the tasks with the same questions in both."""
    found = []
    for cell in sorted(before.keys() & behind.keys()):
        old, new = before[cell], behind[cell]
        words = [word for word in old if word in new and old[word]["data"] == new[word]["data"]]
        each = {word: (old[word]["correct"], new[word]["correct"]) for word in words}
        questions = sum(old[word]["questions"] for word in words)
        sums = [sum(pair[at] for pair in each.values()) for at in (0, 1)]
        names = ("algorithm", "model", "nominal_percent", "dense_layers")
        found.append({
            **dict(zip(names, cell, strict=True)),
            "questions": questions,
            "before": 100 * sums[0] / questions,
            "behind": 100 * sums[1] / questions,
            "points": 100 * (sums[1] - sums[0]) / questions,
            "tasks": {
                word: 100 * (pair[1] - pair[0]) / old[word]["questions"]
                for word, pair in each.items()
            },
        })  # fmt: skip
    return found


def mean(found: Sequence[Row], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean of the points over cells, and its 95 % interval over tasks."""
    words = sorted(set.intersection(*(set(row["tasks"]) for row in found)))
    table = np.array([[row["tasks"][word] for word in words] for row in found])
    of_tasks = table.mean(0)
    drawn = np.random.default_rng(seed).choice(of_tasks, (DRAWS, len(words))).mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(of_tasks.mean()), float(low), float(high)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("behind", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    found = pairs(rows_of(args.before), rows_of(args.behind))
    for row in found:
        name = f"{row['algorithm']} {row['nominal_percent']:g} % {row['model']}"
        print(f"{name:45} {row['before']:6.1f} {row['behind']:6.1f} {row['points']:+5.1f}")
    value, low, high = mean(found)
    print(f"mean of {len(found)} cells {value:+.2f} points, {low:+.2f} to {high:+.2f}")
    if args.out:
        lines = [json.dumps(row) + "\n" for row in found]
        last = {"cells": len(found), "points": value, "ci_low": low, "ci_high": high}
        args.out.write_text("".join([*lines, json.dumps(last) + "\n"]))


if __name__ == "__main__":
    main(sys.argv[1:])
