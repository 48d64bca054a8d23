"""FlashAttention through topkv beside the bare library call, 2048 scattered tokens a lane.

    python plugins/flash_attention/benchmarks/attend.py --out flash_attention.jsonl
    python plugins/flash_attention/benchmarks/attend.py --batch 1 8 --unit 1 --splits 1 2 4 8

Every lane attends to 2048 tokens that are scattered, unit by unit, in a buffer of 4096. A cell is
the median over replays of a graph that calls once for each of several input sets, which together
are far larger than the L2 cache. ``us`` is ``attend``; ``library_us`` the library's call alone,
which leaves the LSE in its own layout and empty lanes as they come; ``scheduled_us`` the same with
scheduler metadata that was made before; ``triton_us`` is triton_attention where that is installed.
GB/s counts every row once. Needs CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.plugins import registry
from topkv.types import GroupShape, ModelShape, Tables
from topkv_flash_attention.backend import FlashAttention
from topkv_flash_attention.hopper import FlashAttention3
from topkv_testing.timing import graph_us

TOKENS, SLOT_TOKENS = 2048, 4096
ROTATE_BYTES = 200_000_000
"""Bytes of rows that one graph reads at least; the L2 of an H200 holds 50 MB."""
HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT_HEADS = 128


@frozen
class Cell:
    """One row of the table; ``scope`` is ``"shared"``, ``"kv_head"`` or ``"latent"``."""

    scope: str
    unit: int
    batch: int

    @property
    def latent(self) -> bool:
        return self.scope == "latent"

    @property
    def bytes(self) -> int:
        """Bytes of the tokens of all lanes."""
        row = 576 if self.latent else 2 * KV_HEADS * DIM
        return self.batch * TOKENS * row * 2

    @property
    def shapes(self) -> tuple[ModelShape, GroupShape]:
        units = (TOKENS // self.unit, SLOT_TOKENS // self.unit, 0)
        sizes = (64, self.batch, 131072 // self.unit, *units)
        if self.latent:
            model = ModelShape(
                *(1, LATENT_HEADS, 1, 576, torch.bfloat16, 576**-0.5, "mla"), value_dim=512
            )
            row = (self.unit, 1, 1, 576, torch.bfloat16)
            return model, GroupShape((0,), *row, *sizes, planes=1)
        model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
        lane_heads = KV_HEADS if self.scope == "kv_head" else 1
        row = (self.unit, lane_heads, KV_HEADS // lane_heads, DIM, torch.bfloat16)
        return model, GroupShape((0,), *row, *sizes)

    @property
    def setup(self) -> BackendSetup:
        model, group = self.shapes
        return BackendSetup(model, group, torch.device("cuda"), self.batch, model.group_size)


@frozen
class Inputs:
    """The arguments of one call of ``attend``."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables
    out: Tensor
    lse: Tensor

    @property
    def all(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.tables, self.out, self.lse)

    @property
    def by_lane(self) -> tuple[Tensor, Tensor]:
        """Queries and outputs ``[N, 1, heads of a lane, D]``, as the library takes them."""
        lanes = len(self.tables.table)
        q, out = (each.view(lanes, 1, -1, each.shape[-1]) for each in (self.q, self.out))
        return q, out


def inputs(cell: Cell) -> list[Inputs]:
    """The input sets of a cell; all share one pool, none a row."""
    model, group = cell.shapes
    sets = max(2, -(-ROTATE_BYTES // cell.bytes))
    lanes, slots = cell.batch * group.lane_heads, group.buffer_slots
    heads = group.heads_per_lane
    shape = (sets * lanes * slots, heads, group.planes, group.unit, group.head_dim)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for piece in pool.flatten().split(1 << 28):
        piece.normal_()
    k, v = pool[:, :, 0], pool[:, :, -1]
    lengths = torch.full((lanes,), TOKENS, dtype=torch.int32, device="cuda")
    made = []
    for each in range(sets):
        order = torch.rand(lanes, slots, device="cuda").argsort(1)[:, : group.select]
        first = slots * (each * lanes + torch.arange(lanes, device="cuda"))
        table = (order + first[:, None]).int()
        sizes = (cell.batch, 1, model.num_heads)
        q = torch.randn(*sizes, model.head_dim, device="cuda").bfloat16()
        out = q.new_empty(*sizes, model.out_dim)
        lse = torch.empty(sizes, device="cuda")
        made.append(Inputs(q, k, v, Tables(table, lengths), out, lse))
    return made


def bare(backend: FlashAttention, each: Inputs, splits: int = 0) -> Callable[[], object]:
    """The library's call alone."""
    q, out = each.by_lane
    query, k, v = backend.parts(q, each.k, each.v)
    table, lengths = each.tables.table, each.tables.lengths
    zeros = torch.zeros_like(lengths)
    return partial(
        backend.library.attend,
        *(query, k, v, table, lengths, backend.model.scale, splits, zeros, out),
    )


def scheduled(backend: FlashAttention, each: Inputs, unit: int) -> Callable[[], object] | None:
    """The library's call with ready metadata; None where the library has no such thing."""
    library = backend.library
    if not isinstance(library, FlashAttention3):
        return None
    q, out = each.by_lane
    query, k, v = backend.parts(q, each.k, each.v)
    table, lengths = each.tables.table, each.tables.lengths
    lanes, tokens = len(table), table.shape[1] * unit
    operators: Any = torch.ops._vllm_fa3_C
    if "vLLM" not in library.name or not hasattr(operators, "get_scheduler_metadata"):
        return None
    metadata = operators.get_scheduler_metadata(
        *(lanes, 1, tokens, q.shape[2], k.shape[1], k.shape[3], v.shape[3]),
        *(torch.bfloat16, lengths, None, None, None, None, None, unit, 0),
        *(False, -1, -1, False, 0, None, 0),
    )
    return partial(
        library.call,
        q=query.main,
        k=k.transpose(1, 2),
        v=v.transpose(1, 2),
        q_v=query.latent,
        out=out,
        seqused_k=lengths,
        max_seqlen_q=1,
        max_seqlen_k=tokens,
        page_table=table,
        softmax_scale=backend.model.scale,
        scheduler_metadata=metadata,
    )


def triton_calls(cell: Cell, sets: list[Inputs]) -> list[Callable[[], object]]:
    """Calls of triton_attention; none where it is not installed."""
    if "triton_attention" not in {each.name for each in registry().records() if each.entry}:
        return []
    made = registry().create("backend", "triton_attention", cell.setup, "triton")
    return [partial(made.attend, *each.all) for each in sets]


def measure(cell: Cell, splits: list[int], replays: int) -> dict[str, object]:
    """Measure one line of the table."""
    backend = FlashAttention(cell.setup)
    sets = inputs(cell)
    time = partial(graph_us, repeats=replays)
    ours = time(*[partial(backend.attend, *each.all) for each in sets])
    library = time(*[bare(backend, each) for each in sets])
    try:
        ready = [call for each in sets if (call := scheduled(backend, each, cell.unit))]
        for call in ready:
            call()
    except RuntimeError as error:  # a build whose metadata are others; the rest still counts
        print(f"{cell}: no scheduler metadata: {error}", file=sys.stderr)
        ready = []
    triton = triton_calls(cell, sets)
    line: dict[str, object] = {
        "benchmark": "attend_flash_attention",
        "scope": cell.scope,
        "unit": cell.unit,
        "batch": cell.batch,
        "us": round(ours, 2),
        "library_us": round(library, 2),
        "ratio": round(ours / library, 3),
        "scheduled_us": round(time(*ready), 2) if ready else None,
        "triton_us": round(time(*triton), 2) if triton else None,
        "GB/s": round(cell.bytes / ours / 1e3),
        "library": backend.library.name.partition(", ")[0],
    }
    for count in splits:
        calls = [bare(backend, each, count) for each in sets]
        line[f"splits_{count}_us"] = round(time(*calls), 2)
    return line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--unit", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--scope", nargs="+", default=["shared", "kv_head", "latent"])
    parser.add_argument("--splits", type=int, nargs="+", default=[], help="bounds to try as well")
    parser.add_argument("--replays", type=int, default=11)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if not torch.cuda.is_available():
        print("benchmarks/attend.py needs a CUDA device; none is there", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for scope, unit, batch in itertools.product(given.scope, given.unit, given.batch):
        try:
            line = measure(Cell(scope, unit, batch), given.splits, given.replays) | device
        except CapabilityError as refused:  # of this cell; others may be served
            print(f"{scope}, unit {unit}, batch {batch}: {refused}", file=sys.stderr)
            continue
        print(line, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
