"""Time of StreamingLLM's selection per layer-step, and the rate at which it writes ids.

    python plugins/streaming_llm/benchmarks/retrieve.py --out streaming_llm.jsonl

32 q-heads, 8 kv-heads, D = 128. Every cell replays a CUDA graph of ``CALLS`` calls.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import RadixTopK
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_streaming_llm.entry import StreamingParams
from topkv_streaming_llm.launch import StreamingLLMTriton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, PAGE, TOKENS = 32, 8, 128, 64, 131072
INTS = {"dtype": torch.int32, "device": "cuda"}


def topk(rows: int, columns: int, select: int) -> RadixTopK:
    return RadixTopK(TopKSetup(rows, columns, select, torch.device("cuda")))


def measure(requests: int, budget: int, unit: int, scope: str) -> dict[str, object]:
    lanes, select = (KV_HEADS if scope == "kv_head" else 1), budget // unit - 1
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), unit, lanes, KV_HEADS // lanes, DIM, torch.bfloat16, PAGE, requests),
        *(TOKENS // unit, select, 2 * select, 2),
    )
    params, device = StreamingParams(), torch.device("cuda")
    algorithm = StreamingLLMTriton(AlgorithmSetup(model, group, params, device, topk))
    full = torch.full((requests,), TOKENS, **INTS)
    table = torch.zeros(requests, TOKENS // PAGE, **INTS)
    step = StepTensors(torch.arange(requests, **INTS), full, full, full * 0 + 1, full * 0, table)
    nothing = torch.empty(0, device="cuda")
    layer = LayerView(0, 0, group, step, nothing, nothing)
    q = torch.randn(requests, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(requests * lanes, select, **INTS)
    calls = [lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))] * CALLS
    taken = graph_us(*calls, repeats=REPEATS)
    return {
        "requests": requests,
        "budget": budget,
        "unit": unit,
        "scope": scope,
        "retrieve_us": round(taken, 2),
        "write_gbs": round(ids.numel() * 4 / taken / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--budget", type=int, default=2048)
    options = parser.parse_args()
    cells: list[dict[str, object]] = [{"device": torch.cuda.get_device_name()}]
    print(cells[0])
    for scope in ("shared", "kv_head"):
        for unit in (1, 16):
            for requests in options.requests:
                cells.append(measure(requests, options.budget, unit, scope))
                print(cells[-1])
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
