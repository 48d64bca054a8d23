"""``topkv plugins``: lists what is installed, without importing torch."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from inspect import getdoc
from typing import Any

import attrs
import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from topkv.entries import Capabilities, PluginEntry
from topkv.errors import PluginError
from topkv.messages import raised
from topkv.parameters import values
from topkv.plugins import PluginRecord, registry
from topkv_cli.matrix import Cell, matrix, rows_of
from topkv_cli.options import JSON

_MEANING = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def as_dict(record: PluginRecord) -> dict[str, Any]:
    """Return a record as JSON shows it."""
    entry = record.entry
    return {
        "name": record.name,
        "kind": record.kind,
        "package": record.package,
        "version": record.version,
        "hook_api": ".".join(map(str, entry.hook_api)) if entry else None,
        "impls": entry.impls if entry else None,
        "capabilities": attrs.asdict(entry.capabilities) if entry else None,
        "parameters": values(entry.parameters()) if entry else None,
        "problem": record.problem,
    }


def missing(record: PluginRecord) -> dict[str, str]:
    """Find implementations of a usable plugin whose module is missing, and say why.

    Neither the module nor torch is imported for that."""
    paths = record.entry.factories.items() if record.entry and not record.problem else ()
    return {impl: why for impl, path in paths if (why := _absent(path.partition(":")[0]))}


def _absent(module: str) -> str | None:
    try:
        found = find_spec(module)  # imports the packages around it, which have the entry
    except (Exception, SystemExit) as error:
        return f"{module}: {raised(error)}"
    return None if found else f"there is no module {module}"


def failing(record: PluginRecord) -> dict[str, str]:
    """Import every factory of a usable plugin; return reasons of failures by implementation."""
    found = {}
    for impl in record.entry.impls if record.entry and not record.problem else ():
        try:
            registry().factory(record, impl)
        except PluginError as error:
            found[impl] = "; ".join(error.reasons)
    return found


_USUAL = attrs.asdict(Capabilities())


def _takes(entry: PluginEntry | None) -> str:
    """Sum up in a few words what a plugin needs to be usable."""
    if entry is None:
        return ""
    reported, words = entry.capabilities, []
    if reported.units:
        few, many = reported.units
        words.append("single tokens" if many == 1 else f"units {few}-{many}")
    if reported.needs_index:
        words.append("an indexer")
    elif reported.attention != Capabilities().attention:
        words.append(" or ".join(reported.attention))
    if reported.tiers == ("gpu",):
        words.append("GPU only")
    return ", ".join(words)


def _all(entry: PluginEntry) -> list[str]:
    """List capabilities that differ from the usual, and parameters with their defaults, a line
    for each; JSON shows everything."""
    lines = []
    for name, value in attrs.asdict(entry.capabilities).items():
        if value != _USUAL[name]:
            listed = value if isinstance(value, (list, tuple)) else [value]
            between = " to " if name == "units" else ", "
            lines.append(f"{name}: {between.join(map(str, listed))}")
    defaults, found = values(entry.parameters()), _meanings(entry.parameters)
    return lines + [f"params.{name} = {defaults[name]!r}: {found[name]}" for name in defaults]


def _meanings(cls: type) -> dict[str, str]:
    """Meanings of parameters by name, from the docstrings of their class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for names, text in _MEANING.findall(getdoc(base) or ""):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return {each.name: found.get(each.name, "") for each in attrs.fields(cls)}


def _show(
    records: list[PluginRecord],
    broken: list[dict[str, str]],
    verbose: bool,
    console: Console,
) -> None:
    """Print a table of all plugins, capabilities if asked for, then what does not load.

    Args:
        broken: for each record the factories that do not import, and why.
    """
    table = Table(box=None, pad_edge=False)
    for head in ("name", "kind", "package"):
        table.add_column(head, no_wrap=True)
    table.add_column("takes", min_width=20)
    for record, factories in zip(records, broken, strict=True):
        reported = Text("does not load", "red") if record.problem else Text(_takes(record.entry))
        if factories:
            reported.append(
                f"{', ' if reported else ''}{', '.join(factories)} does not import", "red"
            )
        package = f"{record.package} {record.version}"
        table.add_row(record.name, record.kind or "?", package, reported)
    # Names, which people copy, must not be cut off; what a plugin takes may wrap.
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).minimum)
    console.print(table)
    for record in records if verbose else ():
        if record.entry is not None:
            api = ".".join(map(str, record.entry.hook_api))
            console.print(Text(f"\n{record.who}, hook API {api}"))
            for line in _all(record.entry):
                console.print(Padding(Text(line), (0, 0, 0, 2)))
    for record, factories in zip(records, broken, strict=True):
        if record.problem:
            console.print(Text(f"\n{record.who} does not load: {record.problem}", "red"))
        for impl, why in factories.items():
            console.print(Text(f"\n{record.who} does not import, {impl}: {why}", "red"))


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
@JSON
@click.option(
    "--matrix",
    "as_matrix",
    is_flag=True,
    help="Pairs of plugins, and where they are tested.",
)
@click.option("--markdown", is_flag=True, help="The matrix as a table in Markdown.")
@click.option(
    "--verbose", is_flag=True, help="Also hook API, capabilities and parameters of each."
)
@click.option("--check", is_flag=True, help="Import every implementation, and torch with them.")
def command(as_json: bool, as_matrix: bool, markdown: bool, verbose: bool, check: bool) -> None:
    """List what is installed, and what does not load and why.

    Implementations are imported when they are used. Without --check this finds one whose module
    is missing, but not one that fails when it is imported.
    """
    if as_matrix or markdown:
        _show_matrix(matrix(registry().records()), as_json, markdown)
        return
    records = registry().records()
    broken = [failing(record) if check else missing(record) for record in records]
    if as_json:
        shown = [
            as_dict(record) | {"not_importing": factories}
            for record, factories in zip(records, broken, strict=True)
        ]
        click.echo(json.dumps(shown, indent=2, default=str))
    else:
        _show(records, broken, verbose, Console())
