"""Time of PQCache's update, selection and training, and the share of the memory bandwidth.

    python plugins/pqcache/benchmarks/retrieve.py --out pqcache.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, 2047 of 128K tokens, a codebook for each segment but the
last window, which is open. Every cell replays a CUDA graph of ``CALLS`` calls; ``score`` is the
three kernels before top-k. The bytes are codes, codebooks that there are and open keys, read once;
``read_gbs`` is what a plain sum reads. ``train_ms`` is k-means of one segment, and ``encode_ms``
its codes, timed by events.
``--sweep`` instead tries shapes of the score kernel for 16 requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import registry
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_pqcache import launch
from topkv_pqcache.entry import topkv_register_algorithms
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, PAGE, SELECT = 32, 8, 128, 64, 2047
SHAPES = [(64, 8, 4), (128, 4, 4), (128, 8, 4), (128, 16, 4), (256, 4, 4), (256, 8, 8)]
"""(TILE, TILES, num_warps) that ``--sweep`` tries."""
CUDA: dict[str, Any] = {"device": "cuda"}
INTS: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def once_ms(call: Callable[[], object]) -> float:
    """Milliseconds of the second of two calls, by events."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def prepare(requests: int, tokens: int, scope: str) -> tuple[launch.PQCacheTriton, LayerView]:
    lanes = KV_HEADS if scope == "kv_head" else 1
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), 1, lanes, KV_HEADS // lanes, DIM, torch.bfloat16, PAGE, requests, tokens),
        *(SELECT, 2 * SELECT, 32),
    )
    (entry,) = topkv_register_algorithms()
    device = torch.device("cuda")

    def stated(*sizes: int) -> TopK:
        setup = TopKSetup(*sizes, device)
        made: TopK = registry().create("topk", entry.defaults["topk"], setup, "triton")
        return made

    setup = AlgorithmSetup(model, group, entry.parameters(), device, stated)
    algorithm = launch.PQCacheTriton(setup)
    pools = {
        spec.name: torch.zeros((requests, *spec.shape), dtype=spec.dtype, device="cuda")
        for spec in algorithm.representations()
    }
    pools["codes"].random_(0, algorithm.count)
    pools["centroids"].normal_()
    pools["keys"].normal_()
    coded = tokens - algorithm.window
    starts = torch.arange(0, coded, algorithm.segment, **INTS)
    pools["starts"][:, : len(starts)] = starts
    pools["state"][:] = torch.tensor([len(starts), coded], **INTS)
    table = torch.zeros((requests, tokens // PAGE), **INTS)
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0), table
    )
    ring = torch.empty((requests, lanes, 32, KV_HEADS // lanes, 1, DIM), device="cuda")
    ring = ring.to(torch.bfloat16)
    return algorithm, LayerView(0, 0, group, step, ring, ring, pools)


def measure(requests: int, tokens: int, scope: str) -> dict[str, object]:
    algorithm, layer = prepare(requests, tokens, scope)
    q = torch.randn(requests, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(requests, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(requests * layer.group.lane_heads, SELECT, **INTS)
    coded = tokens - algorithm.window
    keys = -(-coded // algorithm.segment) * algorithm.count + algorithm.window
    moved = KV_HEADS * (coded * algorithm.subvectors + keys * DIM * 2)
    score = per_call(lambda: algorithm.lane_scores(layer, q[:, 0]))
    whole = torch.randn(algorithm.segment, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return {
        "requests": requests,
        "tokens": tokens,
        "scope": scope,
        "update_us": round(per_call(lambda: algorithm.update(layer, k, k)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(
            per_call(lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "score_gbs": round(moved * requests / score / 1e3, 1),
        "train_ms": round(once_ms(lambda: algorithm.train(whole)), 2),
        "encode_ms": round(once_ms(lambda: algorithm.encode(layer, 0, 0, 0, whole)), 2),
    }


def sweep(tokens: int) -> Iterator[dict[str, object]]:
    """Shapes of the score kernel, for 16 requests of N tokens."""
    for tile, tiles, warps in SHAPES:
        launch.TILE, launch.TILES = tile, tiles
        launch.BLOCK_U = tile * tiles
        algorithm, layer = prepare(16, tokens, "kv_head")
        algorithm.scoring[0]["num_warps"] = warps
        q = torch.randn(16, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        score = per_call(partial(algorithm.lane_scores, layer, q))
        shape = {"tile": tile, "tiles": tiles, "warps": warps}
        yield {**shape, "tokens": tokens, "score_us": round(score, 2)}


def read_gbs() -> float:
    """Measure the GB/s that a sum over 2 GiB reads: the ceiling for ``score_gbs``."""
    source = torch.zeros(1 << 29, device="cuda")
    return source.numel() * 4 / per_call(source.sum) / 1e3


def cells(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    yield {"device": torch.cuda.get_device_name(), "read_gbs": round(read_gbs(), 1)}
    for tokens in options.tokens:
        if options.sweep:
            yield from sweep(tokens)
            continue
        for scope in ("kv_head", "shared"):
            for requests in options.requests:
                yield measure(requests, tokens, scope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 32768])
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = []
    for cell in cells(options):
        print(cell)
        lines.append(json.dumps(cell) + "\n")
    if options.out:
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
