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


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="JSON alone on stdout.")
def command(as_json: bool) -> None:
    """List what is installed, and what does not load and why."""
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
