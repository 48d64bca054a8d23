"""Document that ``--json`` writes: the rows, and all that they depend on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

import topkv
from topkv_bench.rows import Row, within_limit
from topkv_bench.runs import Bench

if TYPE_CHECKING:
    from topkv_bench.engine_bench import EngineBench

HEAD = ("contestant", "context", "requests", "queries", "accept")
"""Fields that name a row."""

SCHEMA = 1
"""Version of the document, which rises when a key changes its meaning or goes."""


def document(
    bench: Bench | EngineBench, rows: Sequence[Row], command: Sequence[str]
) -> dict[str, Any]:
    """Return all of a run as one object.

    Args:
        bench: the bench that ran.
        rows: rows that are done.
        command: arguments of the process.
    """
    options = bench.options
    limit = options.kv_limit
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "device": device_facts(options.device),
        "command": list(command),
        "commit": commit(),
        "model": {
            "name": options.model,
            "config": options.config_path and str(options.config_path),
            "dtype": str(options.dtype).removeprefix("torch."),
            **bench.facts(),
        },
        "options": {
            **{
                name: getattr(options, name)
                for name in ("contestants", "contexts", "requests", "fill", "drift", "steps")
            },
            **{name: getattr(options, name) for name in ("queries", "accepts")},
            **{name: getattr(options, name) for name in ("warmup", "profiled", "chunk", "engine")},
            "engine_args": dict(options.engine_args),
            "settings": options.settings.as_dict(),
        },
        "rows": list(rows),
        "kv_limit": limit
        and {
            "bytes": limit,
            "rows": [
                {name: row[name] for name in HEAD if name in row}
                | {"device_bytes": row["bytes"]["device"]}
                | {"tokens_per_second": row["tokens_per_second"]}
                for row in within_limit(list(rows), limit)
            ],
        },
    }


def versions() -> dict[str, str | None]:
    """Return the versions of everything that times depend on."""
    found = {name: version(name) for name in ("torch", "transformers", "triton")}
    python = platform.python_version()
    return {"topkv": topkv.__version__, **found, "python": python, "cuda": torch.version.cuda}


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return facts about the device that the model runs on."""
    facts: dict[str, Any] = {"type": device.type, "machine": platform.machine()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts |= {"name": found.name, "memory_bytes": found.total_memory}
    return facts


def commit() -> str | None:
    """Return the commit of the checkout that topkv is imported from; None if installed."""
    folder, name = Path(topkv.__file__).parent, Path(topkv.__file__).name
    try:
        # A package inside somebody else's checkout is none of theirs.
        for arguments in (["ls-files", "--error-unmatch", name], ["rev-parse", "HEAD"]):
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def jsonable(value: Any) -> Any:
    """Convert a value that ``json.dumps`` does not know."""
    return attrs.asdict(value) if attrs.has(type(value)) else str(value)
