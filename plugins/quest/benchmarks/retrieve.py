"""Time of Quest's update and selection per layer-step, and the share of the memory bandwidth.

    python plugins/quest/benchmarks/retrieve.py --out quest.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, unit 16, 127 of the closed units of 128K tokens.
Every cell replays a CUDA graph of ``CALLS`` calls; ``score`` is the two kernels before top-k.
The bytes are the bounds, read once; ``read_gbs`` is what a plain sum reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import RadixTopK
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_quest.entry import QuestParams
from topkv_quest.quest import QuestKernels
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, UNIT, PAGE = 32, 8, 128, 16, 64
INTS = {"dtype": torch.int32, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def topk(rows: int, columns: int, select: int) -> RadixTopK:
    return RadixTopK(TopKSetup(rows, columns, select, torch.device("cuda")))


def measure(requests: int, tokens: int, metadata: str, scope: str) -> dict[str, object]:
    lanes = KV_HEADS if scope == "kv_head" else 1
    units, per_page = tokens // UNIT, PAGE // UNIT
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), UNIT, lanes, KV_HEADS // lanes, DIM, torch.bfloat16, PAGE, requests, units),
        *(127, 256, 2),
    )
    params = QuestParams(metadata=metadata)
    quest = QuestKernels(AlgorithmSetup(model, group, params, torch.device("cuda"), topk))
    pages = units // per_page
    table = 1 + torch.randperm(requests * pages).view(requests, pages)
    pools = {
        spec.name: torch.randn(
            (1 + requests * pages) * per_page, *spec.shape, device="cuda", dtype=torch.bfloat16
        ).to(spec.dtype)
        for spec in quest.spec().representations
    }
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0),
        table.to(**INTS),
    )
    shape = (requests, lanes, 2, KV_HEADS // lanes, UNIT, DIM)
    ring = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    layer = LayerView(0, 0, group, step, ring, ring, pools)
    q = torch.randn(requests, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(requests, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(requests * lanes, 127, **INTS)
    moved = sum(spec.bytes for spec in quest.spec().representations) * units * requests
    score = per_call(lambda: quest.lane_scores(layer, q[:, 0]))
    return {
        "requests": requests,
        "tokens": tokens,
        "metadata": metadata,
        "scope": scope,
        "update_us": round(per_call(lambda: quest.update(layer, k, k)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(
            per_call(lambda: quest.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "score_gbs": round(moved / score / 1e3, 1),
    }


def read_gbs() -> float:
    """Measure the GB/s that a sum over 2 GiB reads: the ceiling for ``score_gbs``."""
    source = torch.zeros(1 << 29, device="cuda")
    return source.numel() * 4 / per_call(source.sum) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=131072)
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(), "read_gbs": round(read_gbs(), 1)}
    ]
    print(cells[0])
    for scope in ("kv_head", "shared"):
        for metadata in ("bf16", "int8"):
            for requests in options.requests:
                cells.append(measure(requests, options.tokens, metadata, scope))
                print(cells[-1])
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
