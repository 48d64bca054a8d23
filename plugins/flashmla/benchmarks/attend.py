"""FlashMLA through topkv beside the bare library call, 2048 tokens a lane.

    python plugins/flashmla/benchmarks/attend.py --out flashmla.jsonl

Each cell replays CUDA graphs of ``CALLS`` calls; ``us`` is ``attend``, which copies the output,
``node_us`` that copy alone: the one node beside the library's.

* ``"layers": "sparse"``: scattered rows. ``library_us`` gets indices that are ready; ``attend``
  finds those that ``adapt_page_table`` wrote along with the table, in the graph as in a step:
  once before the calls, the library's too, and not counted. ``table_us`` is the core's kernel that
  writes the table alone, ``adapt_us`` the one that writes both.
* ``"layers": "resident"``: pages of 64 rows, those of a lane side by side, by the dense decode.
  ``library_us`` has a fresh holder of metadata in each call, as ``attend`` has: its schedule
  belongs to the lengths. ``listed_us`` is the bare sparse kernel over indices of the same tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables
from topkv_authoring.latent_fp8 import encode_fp8
from topkv_authoring.page_table import adapt_page_table
from topkv_flashmla.backend import FlashMLA
from topkv_flashmla.support import LATENT, PAGE
from topkv_testing.backend.plans import StepInputs
from topkv_testing.timing import graph_us

CALLS, REPEATS, SELECT, SLOTS = 8, 9, 2048, 4096


def model_of(heads: int) -> ModelShape:
    return ModelShape(1, heads, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)


def cell(
    backend: FlashMLA,
    layers: str,
    kv_format: str,
    inputs: tuple[Any, ...],
    library: Any,
    adapt: Callable[[], object] | None = None,
) -> dict[str, object]:
    """Time ``attend`` on ``(q, rows, tables)`` and the library on the same."""
    q, rows, tables = inputs
    batch, _, heads, _ = q.shape
    out = q.new_empty(batch, 1, heads, 512)
    lse = torch.empty(batch, 1, heads, device=q.device)
    attend = partial(backend.attend, q, rows, rows, tables, out, lse)
    bare = graph_us(*[library] * CALLS, repeats=REPEATS, first=adapt)
    ours = graph_us(*[attend] * CALLS, repeats=REPEATS, first=adapt)
    result = q.new_empty(batch, 1, backend.heads, 512)
    log = torch.zeros(batch, backend.heads, device=q.device)
    finish = partial(backend.finish, result, log, tables.lengths, out, lse)
    flops = 2 * heads * SELECT * (576 + 512) * batch
    return {
        "layers": layers,
        "batch": batch,
        "heads": heads,
        "kv_format": kv_format,
        "us": round(ours, 2),
        "library_us": round(bare, 2),
        "node_us": round(graph_us(*[finish] * CALLS, repeats=REPEATS), 2),
        "ratio": round(ours / bare, 3),
        "tflops": round(flops / ours / 1e6, 1),
        "provider": backend.provider.name,
    }


def selected(group: GroupShape, batch: int) -> StepInputs:
    """A step whose plan selects ``SELECT`` scattered slots of each request's buffer."""
    step = StepInputs.empty(group, batch, "cuda")
    step.view.step.slots.copy_(torch.arange(batch))
    step.view.step.lengths.fill_(group.max_units)
    step.plan.count.fill_(SELECT)
    order = torch.rand(batch, group.buffer_slots, device="cuda").argsort(1)
    step.plan.slots.copy_(order[:, :SELECT])
    return step


def measure(batch: int, heads: int, kv_format: str) -> dict[str, object]:
    model = model_of(heads)
    fp8 = kv_format == "fp8"
    dim, dtype = (656, torch.uint8) if fp8 else (576, torch.bfloat16)
    group = GroupShape(
        *((0,), 1, 1, 1, dim, dtype, 64, batch, 131072, SELECT, SLOTS, 32), planes=1
    )
    device = torch.device("cuda")
    backend = FlashMLA(BackendSetup(model, group, device, batch, heads))
    rows = torch.randn(batch * group.slots, 1, 1, 576, device=device, dtype=torch.bfloat16)
    rows = encode_fp8(rows) if fp8 else rows
    table = torch.empty(batch, SELECT, dtype=torch.int32, device=device)
    tables = Tables(table, torch.empty(batch, dtype=torch.int32, device=device))
    step = selected(group, batch)
    call = (step.view, step.plan, tables)
    table_us = graph_us(*[partial(adapt_page_table, *call, impl="triton")] * CALLS)
    adapt = partial(backend.adapt_page_table, *call)
    adapt_us = graph_us(*[adapt] * CALLS)
    q = torch.randn(batch, 1, heads, 576, device=device, dtype=torch.bfloat16)
    flat = rows.view(-1, 1, dim)
    indices, options = table[:, None].contiguous(), backend.provider.options
    if fp8:
        # A holder that was filled outside: the library then schedules no more.
        metadata = backend.provider.new_metadata()
        library = partial(
            *(backend.provider.decode, q, flat[None], None, None, LATENT, metadata),
            softmax_scale=model.scale,
            is_fp8_kvcache=True,
            indices=indices,
            **options,
        )
    else:
        library = partial(backend.provider.sparse, q[:, 0], flat, indices, model.scale, **options)
    found = cell(backend, "sparse", kv_format, (q, rows, tables), library, adapt)
    return found | {"table_us": round(table_us, 2), "adapt_us": round(adapt_us, 2)}


def measure_pages(batch: int, heads: int) -> dict[str, object]:
    """Resident layers; the page table is as wide as requests of 131072 tokens make it."""
    model, device = model_of(heads), torch.device("cuda")
    group = GroupShape(
        *((0,), PAGE, 1, 1, 576, torch.bfloat16, PAGE, batch, 131072 // PAGE, 0, 0, 0),
        residency="resident",
        planes=1,
    )
    backend = FlashMLA(BackendSetup(model, group, device, batch, heads))
    used = SELECT // PAGE
    rows = torch.randn(1 + batch * used, 1, PAGE, 576, device=device, dtype=torch.bfloat16)
    table = torch.zeros(batch, group.max_units, dtype=torch.int32, device=device)
    pages = torch.arange(1, 1 + batch * used, dtype=torch.int32, device=device)
    table[:, :used] = pages.view(batch, used)
    lengths = torch.full((batch,), SELECT, dtype=torch.int32, device=device)
    q = torch.randn(batch, 1, heads, 576, device=device, dtype=torch.bfloat16)
    provider = backend.provider

    def library() -> object:
        return provider.decode(
            *(q, rows.transpose(1, 2), table, lengths, LATENT, provider.new_metadata()),
            softmax_scale=model.scale,
            is_fp8_kvcache=False,
            **provider.options,
        )

    tokens = torch.arange(PAGE, PAGE + batch * SELECT, dtype=torch.int32, device=device)
    indices, flat = tokens.view(batch, 1, SELECT), rows.view(-1, 1, 576)
    listed = partial(provider.sparse, q[:, 0], flat, indices, model.scale, **provider.options)
    found = cell(backend, "resident", "model", (q, rows, Tables(table, lengths)), library)
    found["listed_us"] = round(graph_us(*[listed] * CALLS, repeats=REPEATS), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [{"device": torch.cuda.get_device_name()}]
    for kv_format in ("fp8", "model"):
        for heads in (128, 64):
            for batch in (1, 16, 64, 128):
                cells.append(measure(batch, heads, kv_format))
                print(cells[-1], flush=True)
    for heads in (128, 64):
        for batch in (1, 16, 64, 128):
            cells.append(measure_pages(batch, heads))
            print(cells[-1], flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
