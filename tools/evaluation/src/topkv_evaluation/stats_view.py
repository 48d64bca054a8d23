"""Output of ``--stats`` without ``--json``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from topkv_cli.tables import show_table


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
    rows = [
        _cells(str(each["layer"]), *(each[name] for name in names)) for each in stats["layers"]
    ]
    sums = (sum(each[name] for each in stats["layers"]) for name in names)
    show_table(console, columns, [*rows, _cells("all", *sums)])
    console.print(
        Text(
            f"host pages {stats['used_pages']} of {stats['pages']} held, "
            f"request slots {stats['used_slots']} of {stats['slots']}"
        ),
        soft_wrap=True,
    )
