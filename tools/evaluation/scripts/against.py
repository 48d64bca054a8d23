"""Comparison of one algorithm with each other one, on the same contexts.

    python tools/evaluation/scripts/against.py RESULTS --row double_sparsity --out FILE

RESULTS are files of rows, or folders of ``grid.py`` and ``topkv eval``. Rows of the same model,
tokens, budget and dense layers are compared on the tasks that both have, context by context.
Prints for each its mean, and its difference from the mean of ``--row``, with 95 % intervals: over
contexts, drawn again within their task 10,000 times, so that kinds keep their parts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from topkv_evaluation.eval.results import RESULTS, Row

DRAWS = 10_000
FIELDS = ("kl", "nll_change")
BYTES = ("device_bytes_per_token", "link_bytes_per_token", "context_bytes")
Where = tuple[str, int, float, str]


def read(paths: Sequence[Path]) -> Iterator[Row]:
    """Read the rows of files, and of results in folders, without refused ones."""
    files = [file for path in paths for file in (path.rglob(RESULTS) if path.is_dir() else [path])]
    for file in sorted(files):
        raw = file.read_bytes()
        lines = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode().splitlines()
        rows = map(json.loads, filter(None, lines))
        yield from (row for row in rows if row["plugin"] is not None and "refused" not in row)


def cells_of(rows: Iterator[Row]) -> dict[Where, dict[str, dict[str, Row]]]:
    """Sort rows by model, tokens, budget in percent and dense layers; algorithm; and task."""
    found: dict[Where, dict[str, dict[str, Row]]] = {}
    for row in rows:
        layers = ",".join(map(str, row["dense_layers"]))
        where = (row["model"], row["length"], row["nominal_percent"], layers)
        found.setdefault(where, {}).setdefault(row["algorithm"], {})[row["family"]] = row
    return found


def drawn(tasks: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """Return means over contexts that are drawn again within their tasks; ``[DRAWS]``."""
    generator = np.random.default_rng(seed)
    sums = [
        values[generator.integers(len(values), size=(DRAWS, len(values)))].sum(1)
        for values in tasks
    ]
    means: np.ndarray = np.sum(sums, axis=0) / sum(map(len, tasks))
    return means


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def compared(field: str, row: dict[str, Row], other: dict[str, Row]) -> Row | None:
    """Compare one algorithm with ``row``; None if they share no task with values by context."""
    name = f"{field}_contexts"
    shared = [word for word in row if word in other and row[word]["data"] == other[word]["data"]]
    both = [word for word in shared if row[word].get(name) and other[word].get(name)]
    if not both:
        return None
    mine, its = ([np.array(each[word][name]) for word in both] for each in (row, other))
    more = [b - a for a, b in zip(mine, its, strict=True)]
    total = sum(map(len, its))
    low, high = interval(drawn(its))
    more_low, more_high = interval(drawn(more))
    return {
        "tasks": both,
        "contexts": total,
        field: float(sum(map(np.sum, its)) / total),
        "low": low,
        "high": high,
        "more": float(sum(map(np.sum, more)) / total),
        "more_low": more_low,
        "more_high": more_high,
        **{name: float(np.mean([other[word][name] for word in both])) for name in BYTES},
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--row", required=True, help="the algorithm that others stand beside")
    parser.add_argument("--field", choices=FIELDS, default=FIELDS[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    lines = []
    for where, algorithms in sorted(cells_of(read(args.results)).items()):
        if args.row not in algorithms:
            continue
        print(f"{where[0]}, {where[1]} tokens, {where[2]:g} %, dense layers: {where[3] or 'none'}")
        for name, tasks in algorithms.items():
            found = compared(args.field, algorithms[args.row], tasks)
            if found is None:
                continue
            names = ("model", "length", "nominal_percent", "dense_layers")
            lines.append({**dict(zip(names, where, strict=True)), "algorithm": name, **found})
            print(
                f"  {name:40} {found[args.field]:.4f} [{found['low']:.4f}, {found['high']:.4f}]"
                f"  {found['more']:+.4f} [{found['more_low']:+.4f}, {found['more_high']:+.4f}]"
                f"  of {found['contexts']}"
            )
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
