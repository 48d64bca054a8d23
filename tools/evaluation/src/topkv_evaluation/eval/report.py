"""Output of ``topkv eval`` without ``--json``: a table for each context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topkv.config.layers import show_ranges
from topkv_cli.tables import show_table
from topkv_evaluation.eval.choices import EXACT
from topkv_evaluation.stats_view import show_stats

COLUMNS = ("algorithm", "dense layers", "budget", "nominal", "with index", "right", "95 %")
COLUMNS += ("recall", "best", "KL", "NLL +", "same", "hits", "KiB", "link KiB", "s")

NOTES = (
    "with index: budget and what a step reads of representations, in tokens of keys and values",
    "recall: attention mass that the selection holds; best: what the best tokens of the same "
    "number would hold",
    "95 %: of right answers, by Wilson; KL and NLL + in nats a token, and same, the share of "
    "equal best tokens: of logits beside those of dense attention, while the right answer is fed",
    "KiB, link KiB: what a step reads from device memory and fetches from the host, in all layers",
)
EXACT_NOTE = f"{EXACT}: double_sparsity with all channels, the exact top-k of query times key"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _right(row: dict[str, Any]) -> tuple[str, str]:
    if row["accuracy"] is None:
        return "", ""
    right = f"{row['correct']:g}/{row['questions']} {_percent(row['accuracy'])}"
    return right, f"{_percent(row['ci_low'])} - {_percent(row['ci_high'])}"


def _cells(row: dict[str, Any]) -> list[str]:
    dense = show_ranges(row["dense_layers"]) or "none"
    head = [row["algorithm"], dense, str(row["budget_tokens"]), f"{row['nominal_percent']:g}%"]
    if "refused" in row:
        return [*head, "", "refused"]
    return [
        *head,
        f"{row['with_index_percent']:.1f}%",
        *_right(row),
        _percent(row["recall"]),
        _percent(row["exact_recall"]),
        _number(row["kl"]),
        _number(row["nll_change"]),
        _percent(row["agreement"]),
        _percent(row["hit_rate"]),
        f"{row['device_bytes_per_token'] / 1024:.1f}",
        f"{row['link_bytes_per_token'] / 1024:.1f}",
        f"{row['seconds']:.1f}",
    ]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print tables by task, then what they mean."""
    show_tasks(rows, console)
    show_notes(rows, console)


def show_tasks(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table of each task, then the counts of layers where they were asked for."""
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = (_cells(row) for row in rows if row["task"] == task)
        show_table(console, COLUMNS, cells, left=COLUMNS[:2], title=task)
        console.print()
    for row in rows:
        if "stats" in row:
            dense = show_ranges(row["dense_layers"]) or "none"
            where = f"{row['algorithm']}, dense layers {dense}, budget {row['budget_tokens']}"
            console.print(Text(f"{where}, {row['task']}"))
            show_stats(row["stats"], console)
            console.print()


def show_notes(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the meaning of columns, and the reasons of refused cells, each once."""
    used = {row["plugin"] for row in rows if row["algorithm"].split(":")[0] == EXACT}
    for note in (*NOTES, *([EXACT_NOTE] if used else [])):
        console.print(Text(note, "dim"), soft_wrap=True)
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            where = f"{row['algorithm']} at {row['budget_tokens']} of {row['context']}"
            refusals.setdefault(row["refused"], []).append(where)
    for reason, where in refusals.items():
        places = ", ".join(dict.fromkeys(where))
        console.print(Text(f"refused ({places}): {reason}", "yellow"), soft_wrap=True)
