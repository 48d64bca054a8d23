"""Picture of the curve of ``topkv simulate``, and the function that writes all pictures.

Needs matplotlib, the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from topkv_simulate.curve import Curve, Point


def draw(curve: Curve, points: Sequence[Point], best: int | None, path: Path) -> None:
    """Draw misses over buffers, a line for each policy; marks recorded and recommended buffer.

    Args:
        curve: curve of the trace.
        points: points to draw.
        best: the recommended buffer, if there is one.
        path: of the picture, whose ending names its format; overwritten.
    """

    def on(panel: Any) -> None:
        for index, policy in enumerate(dict.fromkeys(point.policy for point in points)):
            line = [point for point in points if point.policy == policy]
            misses = [100 * (1 - point.hit_rate) for point in line]
            sizes = [point.buffer for point in line]
            panel.plot(sizes, misses, marker="o", markersize=4, color=f"C{index}", label=policy)
        for buffer in sorted(set(curve.recorded)):
            panel.axvline(buffer, color="gray", linewidth=1, linestyle=":", label="recorded")
        if best is not None:
            panel.axvline(best, color="gray", linewidth=1, label="recommended")
        panel.set_xscale("log", base=2)
        sizes = sorted({point.buffer for point in points})
        panel.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        panel.set_xlabel("buffer, tokens a lane")
        panel.set_ylabel("misses, % of the selected units")

    saved(on, path)


def saved(on: Callable[[Any], None], path: Path) -> None:
    """Draw on a panel and write it.

    Args:
        on: draws.
        path: of the picture, whose ending names its format; overwritten.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    on(panel)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
