"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_table(
    console: Console,
    head: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    left: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """Print a table, of which neither a narrow terminal nor a pipe cuts anything off.

    Args:
        console: where to; it becomes as wide as the table.
        head: names of the columns.
        rows: cells, which may be fewer than columns.
        left: columns whose cells stand to the left, the first by default; figures to the right.
        title: line above.
    """
    title_text = None if title is None else Text(title)
    table = Table(box=None, pad_edge=False, title=title_text, title_justify="left")
    for name in head:
        stands = "left" if name in (head[:1] if left is None else left) else "right"
        table.add_column(name, no_wrap=True, justify=stands)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
