"""Grid of the tables: all algorithms on the mixture of tasks, on questions to report on.

    python tools/evaluation/scripts/grid.py --model DIR --out benchmarks/results/eval/grid \\
        --processes 6 --minutes 8

A call measures missing cells until its minutes are over, several tasks at a time on one device;
calls add up. ``--minutes 0`` measures nothing. Each call writes all results anew:
``MODEL-LENGTH.jsonl.xz`` with a row for each task, algorithm, budget and set of dense layers,
``MODEL-LENGTH.all.jsonl.xz`` with a row over all tasks for each of the last three,
``MODEL-LENGTH.md`` with tables, and ``MODEL-LENGTH.svg`` with plots over bytes. Figures have four
digits. Rows of ``kvpress_rows.py --out OUT/parts/MODEL-LENGTH/kvpress`` are included.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from topkv.config.layers import show_ranges
from topkv.errors import TopkvError
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.commands import ModelFolder
from topkv_evaluation.eval import plot
from topkv_evaluation.eval.choices import split_algorithms
from topkv_evaluation.eval.intervals import wilson
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan
from topkv_evaluation.eval.results import RESULTS, Results, Row, read_rows
from topkv_evaluation.tasks.ruler import MADE
from topkv_evaluation.tasks.splits import REPORTING, STARTS

ALGORITHMS = (
    "quest,double_sparsity,pariskv,clusterkv,snapkv@snapkv:generated={steps},streaming_llm,exact"
)
BUDGETS, DENSE = "1%,2%,5%,10%", ("none", "0-1")
WORDS = ("facts", *(f"ruler:{name}" for name in MADE), "near_keys", "walk")
QUESTIONS, PER_CONTEXT = 15, 3
"""Questions of each of the fourteen tasks, 210 in a cell; and of each context of facts."""

MEANS = ("kl", "nll_change", "agreement", "recall", "exact_recall")
BYTES = ("device_bytes_per_token", "link_bytes_per_token", "context_bytes")
LEFT_OUT = {
    *("key", "seconds", "decode_seconds", "index_tokens", "with_index_percent"),
    *("metadata_bytes", "host_kv_bytes", "selected_units", "loaded_units"),
    *("nll_low", "nll_high", "recall_low", "recall_high", "agreement_low", "agreement_high"),
    *("nll_change_low", "nll_change_high"),
}
"""Fields that results lack: times of a device that processes share, what follows from others, and
intervals that nobody reads."""


@dataclass(frozen=True)
class Job:
    """One task with all that is compared on it, in a folder of its own."""

    options: Options
    folder: Path
    until: float


def run_job(job: Job) -> str:
    """Measure until ``until``, a cell more at most; results stay in the folder.

    Returns:
        A line that says how far it came.
    """
    if torch.cuda.is_available():
        torch.set_num_threads(1)  # processes share the cores
    name = job.folder.name
    if time.time() >= job.until:
        return f"{name}: not begun"
    try:
        plan = Plan.of(job.options)
    except TopkvError as error:
        return f"{name}: {error}"
    results = Results(job.folder)
    for row in plan.run(results.done(), lambda cell: None, lambda questions: None):
        row.pop("stats", None)
        results.add(row)
        if time.time() >= job.until:
            break
    return f"{name}: {len(plan.keyed().keys() & results.rows.keys())} of {len(plan.cells)} cells"


def jobs_of(args: argparse.Namespace, parts: Path) -> list[Job]:
    """Make a job for each task, dense layers and some algorithms, the longest answers first."""
    until = time.time() + 60 * args.minutes
    words = sorted(args.tasks, key=lambda word: word not in ("walk", "ruler:cwe"))
    every = split_algorithms(args.algorithms)
    few = args.per_job or len(every)
    shares = [",".join(every[first : first + few]) for first in range(0, len(every), few)]
    return [
        Job(
            Options(
                algorithms=(share,),
                model=args.model,
                tasks=(word,),
                contexts=(args.length,),
                budgets=args.budgets,
                questions=args.questions,
                per_context=PER_CONTEXT,
                dense_layers=(dense,),
                device=args.device,
                split=args.split,
                forced=args.questions,
            ),
            parts / f"{word.replace(':', '-')}-{dense}{f'-{number}' if number else ''}",
            until,
        )
        for number, share in enumerate(shares)
        for word in words
        for dense in args.dense_layers
    ]


def mixtures(rows: Sequence[Row]) -> list[Row]:
    """Make a row over all tasks for each algorithm, budget and set of dense layers.

    Right answers are of all questions together, other figures means over tasks. ``lacks`` names
    the tasks for which the cell is missing or was refused.
    """
    words = {row["family"] for row in rows}
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        dense = tuple(row["dense_layers"])
        where = (row["algorithm"], dense, row["nominal_percent"])
        groups.setdefault(where, []).append(row)
    return [_mixture(label, group, words) for (label, *_), group in groups.items()]


def _mixture(label: object, group: Sequence[Row], words: set[str]) -> Row:
    there = [row for row in group if "refused" not in row]
    found: Row = {
        "algorithm": label,
        **{
            name: group[0][name] for name in ("plugin", "dense_layers", "nominal_percent", "model")
        },
        "lacks": sorted(words - {row["family"] for row in there}),
    }
    if not there:
        return {**found, "refused": group[0]["refused"]}
    asked = [row for row in there if row["accuracy"] is not None]
    correct, total = (sum(row[name] for row in asked) for name in ("correct", "questions"))
    low, high = wilson(correct, total) if asked else (None, None)
    found |= {"correct": correct, "questions": total, "ci_low": low, "ci_high": high}
    found["accuracy"] = correct / total if asked else None
    for name in (*MEANS, *BYTES):
        values = [row[name] for row in there if row[name] is not None]
        found[name] = sum(values) / len(values) if values else None
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a table of right answers by algorithm and budget, as Markdown."""
    shares = sorted({row["nominal_percent"] for row in rows if row["plugin"]})
    lines = [["algorithm", "dense layers", *(f"{share:g} %" for share in shares)]]
    lines.append(["---"] * len(lines[0]))
    held: dict[tuple[str, str], dict[float, Row]] = {}
    for row in rows:
        where = (row["algorithm"], show_ranges(row["dense_layers"]) or "none")
        held.setdefault(where, {})[row["nominal_percent"]] = row
    for (label, dense), by_share in held.items():
        if by_share[next(iter(by_share))]["plugin"] is None:
            line = [_shown(by_share[100.0])] * len(shares)
        else:
            line = [_shown(by_share.get(share)) for share in shares]
        lines.append([label, dense, *line])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(row: Row | None) -> str:
    """Return right answers in percent, with the number of lacking tasks, if any."""
    if row is None or row.get("accuracy") is None:
        return "-"
    lacks = f" (without {len(row['lacks'])} tasks)" if row.get("lacks") else ""
    return f"{100 * row['accuracy']:.1f}{lacks}"


def summarize(rows: Sequence[Row], target: Path) -> None:
    """Write rows, tables and plots."""
    mixed = mixtures(rows)
    for suffix, lines in ((".all.jsonl.xz", mixed), (".jsonl.xz", rows)):
        target.with_suffix(suffix).write_bytes(
            lzma.compress(_lines(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
        )
    if not rows:
        return
    parts = [f"Right answers in percent, {len({row['family'] for row in rows})} tasks together:",
             table(mixed)]  # fmt: skip
    for word in dict.fromkeys(row["family"] for row in rows):
        parts += [f"`{word}`:", table([row for row in rows if row["family"] == word])]
    target.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if plot.can_draw():
        drawn = plot.svg([row for row in mixed if "refused" not in row and not row["lacks"]])
        target.with_suffix(".svg").write_text(drawn, encoding="utf-8")


def _lines(rows: Sequence[Row]) -> str:
    """Return rows as JSON lines with rounded figures, without ``LEFT_OUT``."""
    short = [{name: _short(row[name]) for name in row if name not in LEFT_OUT} for row in rows]
    return "".join(json.dumps(row) + "\n" for row in short)


def _short(value: object) -> object:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def gathered(parts: Path) -> list[Row]:
    """Read all rows below a folder, each once: every job of a task measures dense attention."""
    rows: dict[str, Row] = {}
    for path in sorted(parts.glob(f"*/{RESULTS}")):
        rows |= {row["key"]: row for row in read_rows(path.parent)}
    return [*rows.values()]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=str(CHECKPOINT), help="a directory, or smollm2")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--tasks", nargs="+", default=[*WORDS])
    parser.add_argument("--algorithms", default=ALGORITHMS, help="as topkv eval takes them")
    parser.add_argument("--per-job", type=int, help="algorithms of a job; all by default")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--dense-layers", nargs="+", default=[*DENSE])
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of a task")
    parser.add_argument("--split", choices=[*STARTS], default=REPORTING)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    args.model = ModelFolder().convert(args.model, None, None)
    return args


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    name = f"{args.model.resolve().name}-{args.length}"
    parts = args.out / "parts" / name
    parts.mkdir(parents=True, exist_ok=True)
    if args.minutes > 0:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            for line in pool.imap_unordered(run_job, jobs_of(args, parts)):
                print(line, flush=True)
    rows = gathered(parts)
    summarize(rows, args.out / name)
    print(f"{len(rows)} rows in {args.out / name}.jsonl.xz")


if __name__ == "__main__":
    main(sys.argv[1:])
