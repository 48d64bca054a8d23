"""Picture of tokens a second and device bytes over requests. Needs matplotlib, extra ``plot``."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from topkv_bench.contestants import NAMES
from topkv_bench.rows import OK


def _kind(row: dict[str, Any]) -> tuple[str, int, str]:
    """Contestant, context, and what else a line is of: queries and acceptance, if any."""
    more = f", {row['queries']} queries" if "queries" in row else ""
    if row.get("accept") is not None:
        more += f", {row['accept']:g} accepted"
    return row["contestant"], row["context"], more


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a column of two panels for each context, a line for each contestant, and for
    each number of queries and acceptance of it.

    Args:
        document: see ``topkv_bench.document``.
        path: of the picture, whose ending says the format; overwritten.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["status"] == OK]
    kinds = sorted({_kind(row)[2] for row in rows})
    contexts = sorted({row["context"] for row in document["rows"]})
    figure = Figure(figsize=(4.8 * len(contexts) + 1.6, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(contexts), squeeze=False, sharex="col", sharey="row")
    for column, context in enumerate(contexts):
        speed, memory = panels[0][column], panels[1][column]
        for number, (name, more) in enumerate(product(NAMES, kinds)):
            line = [row for row in rows if _kind(row) == (name, context, more)]
            line.sort(key=lambda row: row["requests"])
            if line:
                requests = [row["requests"] for row in line]
                style = {"color": f"C{number}", "marker": "o", "markersize": 4}
                label = f"{name}{more}"
                speed.plot(requests, [r["tokens_per_second"] for r in line], label=label, **style)
                held = [row["bytes"]["device"] / 2**30 for row in line]
                memory.plot(requests, held, **style)
        if document["kv_limit"]:
            memory.axhline(document["kv_limit"]["bytes"] / 2**30, color="gray", linestyle=":")
        speed.set_title(f"context {context}", fontsize=10)
        memory.set_xlabel("requests")
        memory.set_xticks(sorted({row["requests"] for row in document["rows"]}))
        for panel in (speed, memory):
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens a second")
    panels[1][0].set_ylabel("KV and its like on the device, GiB")
    lines: dict[Any, Any] = {}
    for panel in panels[0]:
        found = zip(*panel.get_legend_handles_labels(), strict=True)
        lines |= {label: handle for handle, label in found}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
