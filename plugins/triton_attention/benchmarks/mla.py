"""Time ``attend`` over latent rows: 512 + 64 elements, bfloat16 queries, both row formats.

    python plugins/triton_attention/benchmarks/mla.py --out mla.jsonl
    python plugins/triton_attention/benchmarks/mla.py --sweep --batch 64 --heads 128

Every request attends to 2048 tokens that are scattered, row by row, in a buffer of 4096 slots. A
cell is the median over replays of a graph that calls once for each of several input sets, which
together are far larger than the L2 cache. TFLOP/s counts both products, over 576 and 512 elements;
GB/s counts every row once. Where FlashMLA is installed, it is timed on the same rows. Needs CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor
from triton.runtime.errors import OutOfResources

from topkv.types import Tables
from topkv_authoring.latent_fp8 import ROW_BYTES, encode_fp8
from topkv_testing.timing import graph_us
from topkv_triton_attention.mla_launch import LatentDecoder, LatentLaunch
from topkv_triton_attention.mla_reference import LatentShape

LATENT, ROPE = 512, 64
SCALE = (LATENT + ROPE) ** -0.5
ROTATE_BYTES = 200_000_000
"""Bytes of rows that one graph reads at least; the L2 of an H200 holds 50 MB."""
SLOTS = 4096
"""Slots of the buffer of a request."""
SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 32)
LIBRARIES = ("flash_mla", "sgl_flash_mla")
"""Modules that may hold FlashMLA's ``flash_mla_with_kvcache``."""


@frozen
class Cell:
    """One row of the table."""

    kv_format: str
    heads: int
    batch: int
    tokens: int

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES if self.kv_format == "fp8" else 2 * (LATENT + ROPE)

    @property
    def bytes(self) -> int:
        return self.batch * self.tokens * self.row_bytes

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.tokens * self.heads * (2 * LATENT + ROPE)


@frozen
class Inputs:
    """One call: q ``[B, 1, H, 576]``, rows ``[slots, 1, 1, row]``, tables of ``[B, tokens]``."""

    q: Tensor
    rows: Tensor
    tables: Tables
    out: Tensor
    lse: Tensor


def buffer(cell: Cell, slots: int) -> Tensor:
    """Random rows, encoded piece by piece."""
    dtype = torch.uint8 if cell.kv_format == "fp8" else torch.bfloat16
    row = cell.row_bytes // dtype.itemsize
    pool = torch.empty(slots, 1, 1, row, dtype=dtype, device="cuda")
    for piece in pool[:, 0, 0].split(1 << 16):
        values = torch.randn(len(piece), LATENT + ROPE, device="cuda").bfloat16()
        piece.copy_(encode_fp8(values) if cell.kv_format == "fp8" else values)
    return pool


def inputs(cell: Cell) -> list[Inputs]:
    """The input sets of a cell; all share one pool, none a row."""
    sets = max(2, -(-ROTATE_BYTES // cell.bytes))
    requests = sets * cell.batch
    pool = buffer(cell, requests * SLOTS)
    order = torch.rand(requests, SLOTS, device="cuda").argsort(1)[:, : cell.tokens]
    listed = order + SLOTS * torch.arange(requests, device="cuda")[:, None]
    lengths = torch.full((cell.batch,), cell.tokens, dtype=torch.int32, device="cuda")
    made = []
    for table in listed.int().split(cell.batch):
        q = torch.randn(cell.batch, 1, cell.heads, LATENT + ROPE, device="cuda").bfloat16()
        lse = torch.empty(q.shape[:3], device="cuda")
        tables = Tables(table.contiguous(), lengths)
        made.append(Inputs(q, pool, tables, q[..., :LATENT].clone(), lse))
    return made


def decoder(
    cell: Cell, launch: LatentLaunch | None = None, splits: int | None = None
) -> LatentDecoder:
    shape = LatentShape(LATENT, ROPE, cell.kv_format)
    where = torch.device("cuda")
    return LatentDecoder(
        cell.batch, cell.heads, shape, torch.bfloat16, SCALE, where, launch, splits
    )


def attend_us(decode: LatentDecoder, sets: list[Inputs], replays: int) -> float:
    calls = (partial(decode.attend, s.q, s.rows, s.rows, s.tables, s.out, s.lse) for s in sets)
    return graph_us(*calls, repeats=replays)


def library(cell: Cell, each: Inputs) -> Callable[[], object] | None:
    """The call of a cell by FlashMLA; None where it is not installed or does not offer the cell.

    Its sparse decode takes packed rows, and 64 or 128 heads.
    """
    found = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    if not found or cell.kv_format != "fp8" or cell.heads not in (64, 128):
        return None
    module = importlib.import_module(found[0])
    schedule = module.get_mla_metadata()[0]  # filled by the first call
    # Builds of one package for all keep the kernels of Hopper behind a switch.
    switch = "use_legacy" in inspect.signature(module.flash_mla_with_kvcache).parameters
    options = {"use_legacy": True} if switch else {}
    return partial(
        module.flash_mla_with_kvcache,
        q=each.q,
        k_cache=each.rows,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=LATENT,
        tile_scheduler_metadata=schedule,
        softmax_scale=SCALE,
        is_fp8_kvcache=True,
        indices=each.tables.table[:, None],
        **options,
    )


def launches(cell: Cell) -> list[LatentLaunch]:
    """Launches that ``--sweep`` tries. Blocks of 64 heads fill the registers of 8 warps."""
    made = []
    for heads, block in itertools.product((16, 32, 64), (16, 32, 64)):
        if heads > max(16, cell.heads) or (heads == 16 and cell.heads > 64):
            continue
        for warps, stages in itertools.product((4, 8) if heads < 64 else (8,), (1, 2, 3)):
            made.append(LatentLaunch(heads, block, warps, stages, 1))
    return made


def sweep(cell: Cell, sets: list[Inputs], replays: int) -> list[dict[str, object]]:
    """Measure every combination with the splits that follow from it, then the best with others."""
    found: list[tuple[float, LatentLaunch, int]] = []

    def attempt(launch: LatentLaunch, splits: int | None) -> None:
        decode = decoder(cell, launch, splits)
        time = attend_us(decode, sets, replays)
        found.append((time, launch, decode.split_count(cell.batch, cell.tokens)))

    for launch, resident in itertools.product(launches(cell), (1, 2)):
        try:
            attempt(evolve(launch, resident=resident), None)
        except OutOfResources:
            continue  # too much shared memory
    found.sort(key=lambda each: each[0])
    for launch, splits in itertools.product([launch for _, launch, _ in found[:3]], SPLITS):
        if splits * launch.block <= cell.tokens:
            attempt(launch, splits)
    found.sort(key=lambda each: each[0])
    return [record(cell, *each) for each in found]


def record(
    cell: Cell, time: float, launch: LatentLaunch | None = None, splits: int | None = None
) -> dict[str, object]:
    """A line of the table; without a launch it is the library's."""
    return {
        "benchmark": "attend_latent",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "who": "triton" if launch else "flash_mla",
        "format": cell.kv_format,
        "heads": cell.heads,
        "batch": cell.batch,
        "tokens": cell.tokens,
        "us": round(time, 2),
        "TFLOP/s": round(cell.flops / time / 1e6, 1),
        "GB/s": round(cell.bytes / time / 1e3),
        "block_h": launch.heads if launch else "-",
        "block": launch.block if launch else "-",
        "num_warps": launch.num_warps if launch else "-",
        "num_stages": launch.num_stages if launch else "-",
        "splits": splits or "-",
    }


def measure(cell: Cell, sets: list[Inputs], replays: int) -> list[dict[str, object]]:
    """Measure the cell with the constants that the backend would choose, and by the library."""
    decode = decoder(cell)
    splits = decode.split_count(cell.batch, cell.tokens)
    rows = [record(cell, attend_us(decode, sets, replays), decode.launches[0], splits)]
    calls = [call for each in sets if (call := library(cell, each))]
    if calls:
        rows.append(record(cell, graph_us(*calls, repeats=replays)))
    return rows


COLUMNS = (
    *("who", "format", "heads", "batch", "us", "TFLOP/s", "GB/s"),
    *("block_h", "block", "num_warps", "num_stages", "splits"),
)


def show(row: dict[str, object] | None = None) -> None:
    """Print one line of the table, or its head."""
    print("  ".join(f"{name if row is None else row[name]!s:>10}" for name in COLUMNS), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64, 16])
    parser.add_argument("--format", nargs="+", default=["fp8", "model"])
    parser.add_argument("--tokens", type=int, default=2048, help=f"at most {SLOTS}")
    parser.add_argument("--replays", type=int, default=11)
    parser.add_argument("--sweep", action="store_true", help="try launch constants")
    parser.add_argument("--best", type=int, default=3, help="lines a cell that --sweep prints")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if not torch.cuda.is_available():
        print("benchmarks/mla.py needs a CUDA device; none is there", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    show()
    for kv_format, heads, batch in itertools.product(given.format, given.heads, given.batch):
        cell = Cell(kv_format, heads, batch, given.tokens)
        sets = inputs(cell)
        rows = measure(cell, sets, given.replays)
        shown = len(rows)
        if given.sweep:
            rows += sweep(cell, sets, given.replays)
            shown += given.best
        for row in rows[:shown]:
            show(row)
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        del sets
    return 0


if __name__ == "__main__":
    sys.exit(main())
