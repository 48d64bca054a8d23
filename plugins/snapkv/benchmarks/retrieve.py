"""Time of SnapKV's selection per layer-step, and of what it does once per prompt.

    python plugins/snapkv/benchmarks/retrieve.py --out snapkv.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, the default parameters. ``retrieve_us`` is the median of
replays of a CUDA graph of ``CALLS`` calls; ``construct_ms`` (a chunk of 8192) and ``settle_ms``
(the whole prompt, keys on the device) are wall times of one layer of one request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import RadixTopK
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_snapkv.entry import SnapParams
from topkv_snapkv.kernels import SnapKVTriton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, PAGE, CHUNK = 32, 8, 128, 64, 8192
INTS = {"dtype": torch.int32, "device": "cuda"}
HALVES = {"dtype": torch.bfloat16, "device": "cuda"}


def wall_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times[1:]), 3)


def topk(rows: int, columns: int, select: int) -> RadixTopK:
    return RadixTopK(TopKSetup(rows, columns, select, torch.device("cuda")))


def measure(requests: int, tokens: int, budget: int) -> dict[str, object]:
    select = budget - 1
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), 1, KV_HEADS, 1, DIM, torch.bfloat16, PAGE, requests, tokens + 512),
        *(select, 2 * select, 32),
    )
    snapkv = SnapKVTriton(AlgorithmSetup(model, group, SnapParams(), torch.device("cuda"), topk))
    pools = {
        spec.name: torch.zeros((requests, *spec.shape), dtype=spec.dtype, device="cuda")
        for spec in snapkv.spec().representations
    }
    full = torch.full((requests,), tokens + 100, **INTS)
    table = torch.zeros(requests, (tokens + 512) // PAGE, **INTS)
    step = StepTensors(torch.arange(requests, **INTS), full, full, full * 0 + 1, full * 0, table)
    nothing = torch.empty(0, device="cuda")
    layer = LayerView(0, 0, group, step, nothing, nothing, pools)
    keys = torch.randn(tokens, KV_HEADS, DIM, **HALVES)
    queries = torch.randn(CHUNK, HEADS, DIM, **HALVES)
    lse = torch.full((CHUNK, HEADS), 12.0, device="cuda")
    start = tokens - CHUNK

    def history() -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        blocks = zip(range(0, tokens, CHUNK), keys.split(CHUNK), strict=True)
        return [(first, block, block) for first, block in blocks]

    def construct(slot: int) -> None:
        snapkv.construct(layer, slot, start, keys[start:], keys[start:], queries, lse)

    construct_ms = wall_ms(lambda: construct(0))
    settle_ms = wall_ms(lambda: snapkv.settle(layer, 0, 0, tokens, history()))
    for slot in range(1, requests):
        construct(slot)
        snapkv.settle(layer, slot, 0, tokens, history())
    ids = torch.empty(requests * KV_HEADS, select, **INTS)
    q = queries[:requests, None]
    calls = [lambda: snapkv.retrieve_topk(layer, q, None, Selection(ids))] * CALLS
    taken = graph_us(*calls, repeats=REPEATS)
    return {
        "requests": requests,
        "tokens": tokens,
        "budget": budget,
        "retrieve_us": round(taken, 2),
        "copy_gbs": round(ids.numel() * 8 / taken / 1e3, 1),
        "construct_ms": construct_ms,
        "settle_ms": settle_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--budget", type=int, default=2048)
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [{"device": torch.cuda.get_device_name()}]
    print(cells[0])
    for requests in options.requests:
        cells.append(measure(requests, options.tokens, options.budget))
        print(cells[-1])
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
