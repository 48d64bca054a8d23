"""What ``--stats`` shows without ``--json``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def _cells(layer: str, hits: int, misses: int, loaded_bytes: int) -> list[str]:
    rate = hits / (hits + misses) if hits + misses else 0.0
    return [layer, str(hits), str(misses), f"{rate:.1%}", str(loaded_bytes)]


def show_stats(stats: dict[str, Any], console: Console) -> None:
    """A line for each sparse layer and their sums, then the pages and slots that are held.

    Args:
        stats: of ``measured.stats_of``.
    """
    table = Table("layer", "hits", "misses", "hit rate", "loaded bytes", box=None, pad_edge=False)
    names = ("hits", "misses", "loaded_bytes")
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
