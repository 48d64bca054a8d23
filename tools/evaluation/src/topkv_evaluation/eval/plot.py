"""Pictures of results over bytes. Needs matplotlib, which the extra ``plot`` brings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from topkv.config.layers import show_ranges

Row = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """Metric of one panel.

    Attributes:
        name: field of a row.
        low, high: fields of its interval.
        label: label of the axis.
        scale: factor of the values.
    """

    name: str
    low: str
    high: str
    label: str
    scale: float = 1.0


METRICS = (
    Metric("accuracy", "ci_low", "ci_high", "right answers, %", 100),
    Metric("kl", "kl_low", "kl_high", "KL to dense, nats a token"),
    Metric("agreement", "agreement_low", "agreement_high", "same best token as dense, %", 100),
    Metric("recall", "recall_low", "recall_high", "attention mass held, %", 100),
)
X, X_LABEL = "device_bytes_per_token", "KiB read from device memory for a token"


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def label_of(row: Row) -> str:
    """Return algorithm and dense layers of a row."""
    dense = show_ranges(row["dense_layers"]) or "none"
    return row["algorithm"] if dense == "none" else f"{row['algorithm']}, layers {dense} dense"


def lines_of(rows: Sequence[Row], metric: str) -> dict[str, list[Row]]:
    """Sort rows with a metric by algorithm and dense layers, bytes ascending; no baseline."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row["plugin"] is not None and row.get(metric) is not None:
            lines.setdefault(label_of(row), []).append(row)
    for line in lines.values():
        line.sort(key=lambda row: row[X])
    return lines


def svg(rows: Sequence[Row]) -> str:
    """Draw the rows of one task as an SVG element: a panel for each metric of a row.

    Returns:
        Text that stands in a page of HTML as it is; empty if nothing was measured.
    """
    from matplotlib.figure import Figure

    metrics = [metric for metric in METRICS if lines_of(rows, metric.name)]
    if not metrics:
        return ""
    labels = list(dict.fromkeys(label_of(row) for row in rows if row["plugin"] is not None))
    figure = Figure(figsize=(4.2 * len(metrics), 3.6), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for label, line in lines_of(rows, metric.name).items():
            _draw_line(panel, metric, label, line, labels.index(label))
        _finish(panel, metric, rows)
    found = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return _written(figure)


def _written(figure: Any) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    written = io.StringIO()
    # The same rows give the same bytes: ids from a fixed salt, and no date.
    with rc_context({"svg.hashsalt": "topkv", "svg.fonttype": "path"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def swept(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Sort rows of needles at depths by model, family, algorithm, dense layers and budget."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("depth") is not None and row.get("accuracy") is not None:
            share = f"{row['nominal_percent']:g}%"
            where = (row["model"], row["family"], row["question"], label_of(row), share)
            found.setdefault(where, []).append(row)
    return found


def map_svg(rows: Sequence[Row]) -> str:
    """Draw right answers by length and depth as an SVG element: a panel for each of ``swept``.

    Returns:
        Text as ``svg`` returns it; empty if no needle was asked for at depths.
    """
    from matplotlib.figure import Figure

    groups = swept(rows)
    if not groups:
        return ""
    across = min(4, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(3.2 * across, 2.8 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    for panel, (where, group) in zip(panels, groups.items(), strict=False):
        _draw_map(panel, group)
        label = where[3] if group[0]["plugin"] is None else f"{where[3]}, {where[4]}"
        panel.set_title(f"{where[1]}\n{label}", fontsize=8)
    return _written(figure)


def _draw_map(panel: Any, rows: Sequence[Row]) -> None:
    """Draw a panel: lengths to the right, depths downwards, right answers in percent."""
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    held = {(row["depth"], row["length"]): 100 * row["accuracy"] for row in rows}
    fields = [[held.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    panel.imshow(fields, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for y, line in enumerate(fields):
        for x, value in enumerate(line):
            if value == value:  # not every length has every depth
                panel.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7)
    panel.set_xticks(range(len(lengths)), [f"{length}" for length in lengths], fontsize=7)
    panel.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths], fontsize=7)
    panel.set_xlabel("tokens", fontsize=8)
    panel.set_ylabel("depth", fontsize=8)


def _draw_line(panel: Any, metric: Metric, label: str, line: Sequence[Row], place: int) -> None:
    values = [metric.scale * row[metric.name] for row in line]
    ends = [
        [metric.scale * (row[metric.name] if row.get(end) is None else row[end]) for row in line]
        for end in (metric.low, metric.high)
    ]
    below = [max(value - low, 0) for value, low in zip(values, ends[0], strict=True)]
    above = [max(high - value, 0) for value, high in zip(values, ends[1], strict=True)]
    panel.errorbar(
        [row[X] / 1024 for row in line],
        values,
        yerr=[below, above],
        label=label,
        color=f"C{place % 10}",
        linestyle=("-", "--", ":", "-.")[place // 10 % 4],
        marker="o",
        markersize=4,
        capsize=3,
    )


def _finish(panel: Any, metric: Metric, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for row in rows:
        if row["plugin"] is None and "refused" not in row:
            panel.axvline(row[X] / 1024, color="gray", linestyle=":", linewidth=1, label="dense")
            if metric.name == "accuracy" and row["accuracy"] is not None:
                panel.axhline(100 * row["accuracy"], color="gray", linewidth=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    if metric.scale == 100:
        panel.set_ylim(-3, 103)
    panel.set_xlabel(X_LABEL)
    panel.set_ylabel(metric.label)
    panel.grid(alpha=0.3)
