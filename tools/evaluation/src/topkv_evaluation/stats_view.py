"""Output of ``--stats`` without ``--json``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def _cells(
    layer: str, hits: int, misses: int, loaded_bytes: int, stall_ms: float | None = None
) -> list[str]:
    rate = hits / (hits + misses) if hits + misses else 0.0
    stall = [] if stall_ms is None else [f"{stall_ms:.3f}"]
    return [layer, str(hits), str(misses), f"{rate:.1%}", str(loaded_bytes), *stall]


def show_stats(stats: dict[str, Any], console: Console) -> None:
    """Print a line for each sparse layer and their sums, then the pages and slots that are held.

    Waits of layers for the link are shown where they were measured (observer ``stalls``).

    Args:
        stats: result of ``measured.stats_of``.
    """
    columns = ["layer", "hits", "misses", "hit rate", "loaded bytes"]
    names = ["hits", "misses", "loaded_bytes"]
    if any(layer["stall_ms"] is not None for layer in stats["layers"]):
        columns, names = [*columns, "stall ms"], [*names, "stall_ms"]
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in stats["layers"]:
        table.add_row(*_cells(str(layer["layer"]), *(layer[name] for name in names)))
    table.add_row(*_cells("all", *(sum(x[name] for x in stats["layers"]) for name in names)))
    console.print(table)
    console.print(
        Text(
            f"host pages {stats['used_pages']} of {stats['pages']} held, "
            f"request slots {stats['used_slots']} of {stats['slots']}"
        ),
        soft_wrap=True,
    )
