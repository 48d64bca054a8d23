"""``topkv plugins``: what is installed, without importing torch."""

from __future__ import annotations

import json
from typing import Any

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from topkv.discovery import PluginRecord
from topkv.entries import Capabilities
from topkv.matrix import Cell, matrix, rows_of
from topkv.plugins import registry


def as_dict(record: PluginRecord) -> dict[str, Any]:
    """A record as JSON shows it."""
    entry = record.entry
    return {
        "name": record.name,
        "kind": record.kind,
        "package": record.package,
        "version": record.version,
        "hook_api": ".".join(map(str, entry.hook_api)) if entry else None,
        "capabilities": attrs.asdict(entry.capabilities) if entry else None,
        "problem": record.problem,
    }


_USUAL = attrs.asdict(Capabilities())


def _capabilities(values: dict[str, Any]) -> str:
    """Only what differs from the usual, as text; JSON shows everything."""
    parts = []
    for name, value in values.items():
        if value == _USUAL[name]:
            continue
        if isinstance(value, bool):
            parts.append(name if value else f"no {name}")
        elif name == "units":
            parts.append(f"units {value[0]}-{value[1]}")
        else:
            shown = "|".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            parts.append(f"{name} {shown}")
    return ", ".join(parts)


def _show_matrix(cells: list[Cell], as_json: bool, markdown: bool) -> None:
    head, rows = rows_of(cells)
    if as_json:
        shown = [attrs.asdict(cell) | {"state": cell.state} for cell in cells]
        click.echo(json.dumps(shown, indent=2))
    elif markdown:
        for row in (head, ["---"] * len(head), *rows):
            click.echo(f"| {' | '.join(row)} |")
    else:
        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="JSON alone on stdout.")
@click.option("--matrix", "as_matrix", is_flag=True, help="What goes with what, and where tested.")
@click.option("--markdown", is_flag=True, help="The matrix as a table in Markdown.")
def command(as_json: bool, as_matrix: bool, markdown: bool) -> None:
    """List what is installed, and what does not load and why."""
    if as_matrix or markdown:
        _show_matrix(matrix(registry().records()), as_json, markdown)
        return
    rows = [as_dict(record) for record in registry().records()]
    if as_json:
        click.echo(json.dumps(rows, indent=2, default=str))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("kind", "name", "package", "hook API", "capabilities or problem"):
        table.add_column(head, overflow="fold")
    for row in rows:
        told = Text(row["problem"] or _capabilities(row["capabilities"] or {}))
        if row["problem"]:
            told.stylize("red")
        package = f"{row['package']} {row['version']}"
        table.add_row(row["kind"] or "?", row["name"], package, row["hook_api"] or "?", told)
    Console().print(table)
