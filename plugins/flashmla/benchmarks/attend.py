"""FlashMLA through topkv beside the bare library call, 2048 scattered rows a lane.

    python plugins/flashmla/benchmarks/attend.py --out flashmla.jsonl

Each cell replays CUDA graphs of ``CALLS`` calls on scattered lanes. ``library_us`` gets indices
that are ready; ``us`` is ``attend``, which makes them from the page table and writes the output.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from topkv.kv.rows import encode_fp8
from topkv.testing.timing import graph_us
from topkv.types import GroupShape, ModelShape
from topkv_flashmla.backend import LATENT, FlashMLA

CALLS, REPEATS, SELECT, SLOTS = 8, 9, 2048, 4096


def measure(batch: int, heads: int, kv_format: str) -> dict[str, object]:
    model = ModelShape(1, heads, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)
    fp8 = kv_format == "fp8"
    dim, dtype = (656, torch.uint8) if fp8 else (576, torch.bfloat16)
    group = GroupShape(
        *((0,), 1, 1, 1, dim, dtype, 64, batch, 131072, SELECT, SLOTS, 32), planes=1
    )
    device = torch.device("cuda")
    backend = FlashMLA(model, group, "triton", device, batch)
    rows = torch.randn(batch * group.slots, 1, 1, 576, device=device, dtype=torch.bfloat16)
    rows = encode_fp8(rows) if fp8 else rows
    table = torch.zeros(batch, SELECT, dtype=torch.int32, device=device)
    for lane in range(batch):
        table[lane] = torch.randperm(group.slots, device=device)[:SELECT] + lane * group.slots
    lengths = torch.full((batch,), SELECT, dtype=torch.int32, device=device)
    q = torch.randn(batch, 1, heads, 576, device=device, dtype=torch.bfloat16)
    out, lse = q.new_empty(batch, 1, heads, 512), torch.empty(batch, 1, heads, device=device)
    calls = [partial(backend.attend, q, rows, rows, table, lengths, out, lse)] * CALLS
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
    bare = graph_us(*[library] * CALLS, repeats=REPEATS)
    ours = graph_us(*calls, repeats=REPEATS)
    flops = 2 * heads * SELECT * (576 + 512) * batch
    return {
        "batch": batch,
        "heads": heads,
        "kv_format": kv_format,
        "us": round(ours, 2),
        "library_us": round(bare, 2),
        "ratio": round(ours / bare, 3),
        "tflops": round(flops / ours / 1e6, 1),
        "provider": backend.provider.name,
    }


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
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
