"""Time of ClusterKV's update and selection per layer-step, and of clustering a prompt.

    python plugins/clusterkv/benchmarks/retrieve.py --out clusterkv.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, 1023 of 128K tokens. Update and selection replay a CUDA
graph of ``CALLS`` calls; ``score``, ``take`` and ``expand`` are the three kernels of the
selection. The bytes are the centroids, read once; ``read_gbs`` is what a plain sum reads.
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
from topkv_clusterkv.entry import ClusterParams
from topkv_clusterkv.launch import ClusterKVTriton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, SELECT = 32, 8, 128, 1023
INTS = {"dtype": torch.int32, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def topk(rows: int, columns: int, select: int) -> RadixTopK:
    return RadixTopK(TopKSetup(rows, columns, select, torch.device("cuda")))


def elapsed_ms(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(requests: int, tokens: int, tokens_per_cluster: int) -> dict[str, object]:
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), 1, KV_HEADS, 1, DIM, torch.bfloat16, 64, requests, tokens, SELECT, 4096, 32)
    )
    params = ClusterParams(tokens_per_cluster=tokens_per_cluster)
    algorithm = ClusterKVTriton(AlgorithmSetup(model, group, params, torch.device("cuda"), topk))
    pools = {
        spec.name: torch.zeros(requests, *spec.shape, dtype=spec.dtype, device="cuda")
        for spec in algorithm.spec().representations
    }
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0),
        torch.zeros(requests, tokens // 64, **INTS),
    )
    ring = torch.zeros(requests, KV_HEADS, 32, 1, 1, DIM, device="cuda", dtype=torch.bfloat16)
    layer = LayerView(0, 0, group, step, ring, ring, pools)
    keys = torch.randn(tokens - 1, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    none = torch.empty(0, device="cuda")

    def cluster() -> None:
        algorithm.construct(layer, 0, 0, keys, keys, none, none)
        algorithm.settle(layer, 0, 0, len(keys), [(0, keys, keys)])

    cluster_ms = elapsed_ms(cluster)
    for pool in pools.values():
        pool[1:] = pool[:1]
    q = torch.randn(requests, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    new = keys[:requests]
    ids = torch.empty(requests * KV_HEADS, SELECT, **INTS)
    score = per_call(lambda: algorithm.score(layer, q[:, 0]))
    moved = int(pools["state"][0, 2]) * KV_HEADS * DIM * 2 * requests
    return {
        "requests": requests,
        "tokens": tokens,
        "tokens_per_cluster": tokens_per_cluster,
        "cluster_ms": round(cluster_ms, 2),
        "score_us": round(score, 2),
        "take_us": round(per_call(lambda: algorithm.take(layer, SELECT)), 2),
        "expand_us": round(per_call(lambda: algorithm.expand(layer, ids)), 2),
        "retrieve_us": round(
            per_call(lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "update_us": round(per_call(lambda: algorithm.update(layer, new, new)), 2),
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
    for tokens_per_cluster in (80, 16):
        for requests in options.requests:
            cells.append(measure(requests, options.tokens, tokens_per_cluster))
            print(cells[-1])
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
