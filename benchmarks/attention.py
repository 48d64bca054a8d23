"""Time ``attend`` of the Triton backend: decode attention over scattered units.

    python benchmarks/attention.py --out attention.jsonl
    python benchmarks/attention.py --sweep --batch 8 64 --out sweep.jsonl

Each cell is the median over graph replays of one call, in a graph that calls once for each of
several input sets. The sets together are far larger than the L2 cache, so memory is measured.
GB/s counts keys and values once. The models are GQA of 32 / 8 heads x 128 in bfloat16 by
default. Needs a CUDA device, and nothing beyond torch, triton and topkv.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attrs import frozen
from triton.runtime.errors import OutOfResources

from topkv.types import Tables
from topkv_testing.timing import graph_us
from topkv_triton_attention.launch import DecodeLaunch, Decoder, decode_launch, split_count

ROTATE_BYTES = 400_000_000
"""Bytes of keys and values that one graph reads at least; the L2 of an H200 holds 50 MB."""

BLOCKS = (32, 64, 128)
WARPS = (4, 8)
STAGES = (2, 3, 4)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


@frozen
class Cell:
    """One row of the table."""

    batch: int
    tokens: int
    unit: int
    scope: str
    heads: int
    kv_heads: int
    dim: int

    @property
    def lane_heads(self) -> int:
        return self.kv_heads if self.scope == "kv_head" else 1

    @property
    def bytes(self) -> int:
        return self.batch * self.tokens * self.kv_heads * self.dim * 2 * 2


def inputs(cell: Cell) -> list[tuple[Any, ...]]:
    """Arguments of ``attend`` for each of the sets; all share one buffer, none a unit."""
    sets = max(2, -(-ROTATE_BYTES // cell.bytes))
    lanes, width = cell.batch * cell.lane_heads, cell.tokens // cell.unit
    shape = (sets * lanes * width, cell.kv_heads // cell.lane_heads, 2, cell.unit, cell.dim)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    listed = torch.randperm(shape[0], device="cuda").int().view(sets, lanes, width)
    lengths = torch.full((lanes,), cell.tokens, dtype=torch.int32, device="cuda")
    result = []
    for table in listed:
        q = torch.randn(cell.batch, 1, cell.heads, cell.dim, device="cuda").bfloat16()
        lse = torch.empty(q.shape[:3], device="cuda")
        tables, out = Tables(table, lengths), torch.empty_like(q)
        result.append((q, pool[:, :, 0], pool[:, :, 1], tables, out, lse))
    return result


def decoder(cell: Cell, launch: DecodeLaunch | None = None, splits: int | None = None) -> Decoder:
    return Decoder(
        cell.batch,
        cell.heads,
        cell.heads // cell.kv_heads,
        cell.dim,
        cell.dim**-0.5,
        torch.device("cuda"),
        launch,
        splits,
    )


def microseconds(decode: Decoder, sets: list[tuple[Any, ...]], replays: int) -> float:
    """Median time of one call."""
    return graph_us(*(partial(decode.attend, *arguments) for arguments in sets), repeats=replays)


def measure(cell: Cell, replays: int) -> dict[str, object]:
    """Measure a cell with the constants that the backend would choose."""
    decode = decoder(cell)
    launch = decode_launch(cell.dim, cell.unit, 2)
    programs = cell.batch * cell.kv_heads
    slots = decode.processors * launch.resident
    splits = split_count(programs, cell.tokens, slots, launch.block)
    return record(cell, launch, splits, microseconds(decode, inputs(cell), replays))


def sweep(cell: Cell, replays: int) -> list[dict[str, object]]:
    """Measure a cell with every combination of constants that can be launched, best first."""
    sets = inputs(cell)
    found = []
    for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES):
        launch = DecodeLaunch(block, warps, stages, 1)
        for splits in SPLITS:
            if splits * block > cell.tokens:
                continue
            try:
                time = microseconds(decoder(cell, launch, splits), sets, replays)
            except OutOfResources:
                break  # too much shared memory, whatever the splits
            found.append(record(cell, launch, splits, time))
    return sorted(found, key=lambda each: float(str(each["us"])))


def record(cell: Cell, launch: DecodeLaunch, splits: int, time: float) -> dict[str, object]:
    return {
        "benchmark": "attend",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "batch": cell.batch,
        "tokens": cell.tokens,
        "unit": cell.unit,
        "scope": cell.scope,
        "heads": cell.heads,
        "kv_heads": cell.kv_heads,
        "dim": cell.dim,
        "block": launch.block,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "splits": splits,
        "us": round(time, 2),
        "GB/s": round(cell.bytes / time / 1e3),
    }


COLUMNS = ("batch", "unit", "scope", "us", "GB/s", "block", "num_warps", "num_stages", "splits")


def show(row: dict[str, object] | None = None) -> None:
    """Print one line of the table, or its head."""
    print("  ".join(f"{name if row is None else row[name]!s:>10}" for name in COLUMNS), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of every unit")
    parser.add_argument("--unit", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--scope", nargs="+", default=["shared", "kv_head"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="try launch constants")
    parser.add_argument("--best", type=int, default=3, help="lines a cell that --sweep prints")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py needs a CUDA device; none is there", file=sys.stderr)
        return 2
    show()
    for scope, unit, batch in itertools.product(given.scope, given.unit, given.batch):
        cell = Cell(
            batch, given.tokens, unit, scope, given.heads, given.kv_heads, given.dim
        )  # fmt: skip
        rows = [measure(cell, given.replays)]
        shown = 1
        if given.sweep:
            rows += sweep(cell, given.replays)
            shown += given.best
        for row in rows[:shown]:
            show(row)
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
