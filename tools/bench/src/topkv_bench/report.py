"""Output of ``topkv bench``: times and bytes, requests that fit a limit, times by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topkv_bench.phases import MODEL, PHASES
from topkv_bench.rows import OK, Row
from topkv_cli.tables import show_table

HEAD = ("contestant", "context", "requests")
TIMES = ("tokens/s", "step ms", "p10 - p90", "first s")
REST = ("device GiB", "host GiB", "hits", "link MB/step")
VERIFIED, PER_STEP = ("queries", "accept"), ("tokens/step", "misses/step")
"""Further columns where steps verify tokens: behind ``HEAD``, and behind all others."""

_GIB = 2**30


def show(document: dict[str, Any], console: Console) -> None:
    """Print tables of a document, and the reason of each row without figures."""
    rows: list[Row] = document["rows"]
    verified = any("queries" in row for row in rows)
    columns = (*_names(rows), *TIMES, *REST, *(PER_STEP if verified else ()))
    show_table(console, columns, [_cells(row, verified) for row in rows])
    limit = document["kv_limit"]
    if limit:
        console.print(Text(f"\nwithin {limit['bytes'] / _GIB:g} GiB on the device"))
        cells = [
            [*_head(row), _gib(row["device_bytes"]), f"{row['tokens_per_second']:.1f}"]
            for row in limit["rows"]
        ]
        show_table(console, (*_names(rows), "device GiB", "tokens/s"), cells)
    _profiles(rows, console)
    _notes(rows, console)


def _names(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns that name a row."""
    return (*HEAD, *(VERIFIED if any("queries" in row for row in rows) else ()))


def _head(row: Row) -> list[str]:
    """Cells that name a row."""
    named = [row["contestant"], str(row["context"]), str(row["requests"])]
    if "queries" in row:
        named += [str(row["queries"]), _or_none(row.get("accept"), "{:g}")]
    return named


def _cells(row: Row, verified: bool) -> list[str]:
    if row["status"] != OK:
        return [*_head(row), row["status"]]
    step, link = row["step_ms"], row["link_bytes_per_step"]
    return [
        *_head(row),
        f"{row['tokens_per_second']:.1f}",
        f"{step['median']:.2f}",
        f"{step['p10']:.2f} - {step['p90']:.2f}",
        _or_none(row["first_token_seconds"], "{:.2f}"),
        _gib(row["bytes"]["device"]),
        _gib(row["bytes"]["host"]),
        _or_none(row["hit_rate"], "{:.1%}"),
        "" if link is None else f"{link / 1e6:.1f}",
        *(_per_step(row) if verified else ()),
    ]


def _per_step(row: Row) -> list[str]:
    """Cells of the columns ``PER_STEP``."""
    return [f"{row['tokens_per_step']:g}", _or_none(row["misses_per_step"], "{:.0f}")]


def _or_none(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _gib(size: int) -> str:
    return f"{size / _GIB:.3f}"


def _profiles(rows: Sequence[Row], console: Console) -> None:
    """Print a table of host times, and of device times where there is a device, by phase."""
    profiled = [row for row in rows if row.get("profile")]
    for name, title in (("device_ms", "device"), ("host_ms", "host")):
        found = [row for row in profiled if name in row["profile"]]
        if found:
            console.print(Text(f"\n{title} time of a step by phase, ms, under the profiler"))
            columns = (*_names(rows), *PHASES, MODEL, "wall")
            cells = [
                [
                    *_head(row),
                    *(f"{row['profile'][name][phase]:.2f}" for phase in (*PHASES, MODEL)),
                    f"{row['profile']['wall_ms']:.2f}",
                ]
                for row in found
            ]
            show_table(console, columns, cells)


def _notes(rows: Sequence[Row], console: Console) -> None:
    lines = []
    for row in rows:
        where = " ".join(_head(row)).rstrip()
        if "reason" in row:
            lines.append(f"{where}: {row['status']}: {row['reason']}")
        if "drift" in row:
            drift = row["drift"]
            stated = drift["stated"]
            named = f"trace {stated}" if isinstance(stated, str) else f"drift {stated:g}"
            lines.append(
                f"{where}: {named} written over {drift['layers']} layers, "
                f"{drift['effective']:.4g} in effect in a step"
            )
        if "predicted_step_ms" in row:
            lines.append(f"{where}: predicted {row['predicted_step_ms']:.2f} ms a step, captured")
        if "capture" in row:
            lines.append(f"{where}: capture {row['capture']}")
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line))
