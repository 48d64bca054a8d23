"""``topkv doctor``: reports what this machine offers, and what stands in the way."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from topkv.plugins import PluginRecord, registry
from topkv.plugins.kinds import kinds
from topkv.plugins.records import aside
from topkv_authoring.tested import never_tested
from topkv_cli import probes
from topkv_cli.attaching import attaching
from topkv_cli.options import JSON, Size
from topkv_cli.plugins import as_dict, failing


def diagnose(pool: int | None = None) -> dict[str, Any]:
    """Return everything that doctor knows, or why it cannot be found out.

    Args:
        pool: bytes of a host pool whose time is asked for.
    """
    report = {name: probes.attempt(probe) for name, probe in probes.PROBES.items()}
    packages = {"topkv", *(record.package for record in registry().records())}
    report["never_tested"] = [each for name in sorted(packages) for each in never_tested(name)]
    report["attaching"] = probes.attempt(partial(attaching, pool))
    reported = {
        f"{record.kind} {record.name}": probes.attempt(partial(libraries, record))
        for kind in kinds()
        for record in registry().usable(kind)
        if record.entry and record.entry.doctor
    }
    report["plugins"] = reported
    failed = [as_dict(record) for record in registry().records() if record.problem]
    report["plugins_failed"] = failed + _not_importing()
    return report


def libraries(record: PluginRecord) -> list[str]:
    """Return the lines of a usable plugin about its libraries; none where its entry names none.

    Raises:
        PluginError: the function that its entry names (``doctor``) does not import.
    """
    if record.entry is None or record.entry.doctor is None:
        return []
    describe = registry().load(record, record.entry.doctor)
    with aside():
        return [str(line) for line in describe()]


def _not_importing() -> list[dict[str, Any]]:
    """List plugins of which an implementation does not import.

    Kernels are left out where Triton is missing, which the report says already."""
    found = []
    for record in registry().records():
        broken = failing(record)
        if find_spec("triton") is None:
            broken.pop("triton", None)
        if broken:
            reported = "; ".join(f"{impl} does not import: {why}" for impl, why in broken.items())
            found.append(as_dict(record) | {"problem": reported})
    return found


def _lines(name: str, value: Any, indent: int = 0) -> list[str]:
    label = f"{'  ' * indent}{name}"
    if isinstance(value, dict):
        inner = [line for key, item in value.items() for line in _lines(key, item, indent + 1)]
        return [label, *inner]
    if isinstance(value, list):
        if not value:
            return [f"{label}: none"]
        if isinstance(value[0], str):
            return [label, *(f"{'  ' * (indent + 1)}{line}" for line in value)]
        return [
            line for i, item in enumerate(value) for line in _lines(f"{name} {i}", item, indent)
        ]
    if name.endswith("_bytes") and isinstance(value, int):
        value = f"{value} ({value / 2**30:.2f} GiB)"
    return [f"{label}: {'unknown' if value is None else value}"]


@click.command("doctor", short_help="Show what this machine offers.")
@click.option("--pool", type=Size(), help="Also time a host pool, like 64GiB.")
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Say from config.json alone whether a checkpoint can be attached, and how.",
)
@click.option(
    "--length",
    metavar="N",
    type=click.IntRange(1),
    help="With --model: tokens of a request; by default its positions, at most 32768.",
)
@click.option(
    "--settings",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --model: the configuration to attach it with.",
)
@click.option("--algorithm", metavar="NAME", help="With --model: above that of --settings.")
@click.option("--backend", metavar="NAME", help="With --model: above that of --settings.")
@JSON
def command(
    pool: int | None,
    model: Path | None,
    length: int | None,
    settings: Path | None,
    algorithm: str | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """Show versions, devices, memory, NUMA nodes, what plugins say, and those that do not load.

    The time that attaching a model takes is measured: a gibibyte of host memory, or an eighth of
    what is free, is made as a host pool is made, and let go.

    With --model that is left out, and a checkpoint looked at instead: what would be refused and
    why, what is done with each layer, and, with an algorithm and a backend, the bytes on both
    tiers of one request of --length tokens. No weight is read, and no code of the checkpoint run.
    """
    what = model or "torch, triton and the devices"
    Console(stderr=True).print(f"looking at {what} ...", style="dim")
    with redirect_stdout(sys.stderr):  # plugins ask libraries, which may print
        if model:
            from topkv_cli.checkpoint import examined

            report = examined(model, length, settings, algorithm, backend)
        else:
            report = diagnose(pool)
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
        return
    console = Console(soft_wrap=True)
    for name, value in report.items():
        for line in _lines(name, value):
            console.print(Text(line))
