"""Accuracy over budget as a picture: ``python -m topkv_evaluation.eval.plot DIR`` redraws.

Needs matplotlib, which comes with the extra ``plot``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topkv.config.layers import show_ranges

RESULTS, PICTURE = "results.jsonl", "accuracy.png"
REDRAW = "python -m topkv_evaluation.eval.plot"

Row = dict[str, Any]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def lines_of(rows: Sequence[Row], task: str) -> dict[tuple[str, str], list[Row]]:
    """Measured rows of a task by algorithm and dense layers, budgets ascending; no baseline."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["task"] == task and row["plugin"] is not None and "refused" not in row:
            key = row["algorithm"], show_ranges(row["dense_layers"]) or "none"
            lines.setdefault(key, []).append(row)
    for line in lines.values():
        line.sort(key=lambda row: row["budget_percent"])
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel a task, one line an algorithm; dashed lines have dense layers.

    Args:
        rows: as in ``results.jsonl``.
        path: of the picture; overwritten.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(row["algorithm"] for row in rows if row["plugin"] is not None))
    styles = list(dict.fromkeys(key[1] for task in tasks for key in lines_of(rows, task)))
    figure = Figure(figsize=(6.4 * len(tasks), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for panel, task in zip(panels, tasks, strict=True):
        for (name, dense), line in lines_of(rows, task).items():
            share = [100 * row["accuracy"] for row in line]
            below = [100 * (row["accuracy"] - row["ci_low"]) for row in line]
            above = [100 * (row["ci_high"] - row["accuracy"]) for row in line]
            panel.errorbar(
                [row["budget_percent"] for row in line],
                share,
                yerr=[below, above],
                label=name if dense == "none" else f"{name}, layers {dense} dense",
                color=f"C{names.index(name) % 10}",
                linestyle=("-", "--", ":", "-.")[styles.index(dense) % 4],
                marker="o",
                markersize=4,
                capsize=3,
            )
        _finish(panel, task, rows)
    panels[0].set_ylabel("right answers, % (95 % Wilson intervals)")
    handles = {}
    for panel in panels:
        found = zip(*panel.get_legend_handles_labels(), strict=True)
        handles |= {label: handle for handle, label in found}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)


def _finish(panel: Any, task: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for row in rows:
        if row["task"] == task and row["plugin"] is None and "refused" not in row:
            panel.axhline(100 * row["accuracy"], color="gray", linewidth=1, label="dense")
    shown = sorted({row["nominal_percent"] for row in rows if row["task"] == task})
    panel.set_xscale("log")
    panel.set_xticks([share for share in shown if share < 100] or shown)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(-3, 103)
    panel.set_xlabel("attended tokens, % of the context")
    panel.set_title(task, fontsize=10)
    panel.grid(alpha=0.3)


def main(folder: Path) -> None:
    """Draw the results of a folder anew."""
    lines = (folder / RESULTS).read_text(encoding="utf-8").splitlines()
    draw([json.loads(line) for line in lines], folder / PICTURE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
