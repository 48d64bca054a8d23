"""Steps of plain ``model.generate`` by context, requests and host format, as in the README.

    python benchmarks/generate_tables.py --out benchmarks/results/generate_tables.jsonl

``topkv bench`` on one GPU, one cell after the other: six minutes, and 88 GiB of host memory.
Geometry of Llama-3.1-8B with random weights, Quest with a budget of 2048, selections of which
15 % are new in each step. Each line is a row of the bench with the command that made it, without
its settings.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attrs import frozen

BENCH = (
    *("bench", "--model", "llama-3.1-8b", "--set", "algorithm=quest", "--set", "budget=2048"),
    *("--set", "backend=triton_attention"),
)
POOL, FP8, COMPILE = ("--fill", "pool"), ("--set", "host_format=fp8"), ("--compile",)
SHORT = (*POOL, "--warmup", "4")


@frozen
class Cell:
    """One call of the bench; ``more`` are its further options."""

    context: int
    requests: str
    contestants: str
    steps: int
    more: tuple[str, ...] = SHORT

    def command(self) -> list[str]:
        """Arguments of ``topkv``."""
        given = {name: str(getattr(self, name)) for name in ("context", "requests", "contestants")}
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        return [*BENCH, *self.more, *options, "--steps", str(self.steps)]


BOTH = "topkv-resident,topkv"
CELLS = (
    Cell(32768, "1", BOTH, 48, (*POOL, *COMPILE)),
    Cell(32768, "1", "topkv", 48, (*POOL, *COMPILE, *FP8)),
    Cell(130900, "1", "topkv", 48, (*POOL, *COMPILE)),
    # Requests that fit into 16 GiB of the GPU.
    Cell(128000, "1", "topkv-resident,offloaded", 16),
    Cell(128000, "6", "topkv", 24, (*SHORT, *FP8)),
    Cell(128000, "6", "topkv", 24),
    Cell(32000, "4,16", "topkv-resident", 24),
    Cell(32000, "16", "topkv", 24, (*SHORT, *FP8)),
    Cell(32000, "16", "topkv", 24),
    Cell(32000, "16", "topkv", 24, (*SHORT, *FP8, "--drift", "0.08")),
    Cell(131000, "1", BOTH, 1, ("--prefill-chunk", "8192", "--warmup", "1")),
    Cell(32000, "16", "offloaded", 3, (*POOL, "--warmup", "1")),
)


def measure(cell: Cell) -> list[dict[str, Any]]:
    """Run the bench in a process of its own; return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = cell.command()
        subprocess.run([sys.executable, "-m", "topkv_cli", *command, "--json", out], check=True)
        found = json.loads(out.read_text())
    head = {"command": " ".join(["topkv", *command])}
    head |= {name: found[name] for name in ("commit", "device", "versions")}
    return [
        head | {name: value for name, value in row.items() if name != "settings"}
        for row in found["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(CELLS)), help="cells")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in options.only:
        rows += measure(CELLS[number])
        if options.out:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
