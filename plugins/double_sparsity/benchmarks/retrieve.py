"""Time of Double Sparsity's update and selection per layer-step, and the share of the bandwidth.

    python plugins/double_sparsity/benchmarks/retrieve.py --out double_sparsity.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, 32 channels, 2047 of 128K tokens. Every cell replays a
CUDA graph of ``CALLS`` calls; ``score`` is the two kernels before top-k. The bytes are the labels
with scale and zero, read once; ``read_gbs`` is what a plain sum reads. ``--sweep`` instead tries
shapes of the score kernel for 16 requests, and times shorter contexts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import registry
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_double_sparsity import launch
from topkv_double_sparsity.entry import LabelParams, topkv_register_algorithms
from topkv_double_sparsity.launch import DoubleSparsityTriton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
SHAPES = {
    "bf16": [
        *((32, 4, 5, 1), (32, 8, 3, 1), (32, 8, 5, 1), (32, 8, 7, 1), (32, 16, 5, 1)),
        *((64, 4, 5, 1), (64, 4, 3, 4), (64, 8, 3, 4), (64, 8, 5, 4), (64, 8, 5, 2)),
    ],
    "int4": [
        *((32, 8, 5, 1), (32, 8, 7, 1), (32, 16, 5, 1), (32, 16, 3, 1), (64, 4, 3, 1)),
        *((64, 4, 5, 1), (64, 4, 7, 1), (64, 8, 3, 1), (64, 8, 5, 1), (64, 16, 3, 1)),
        *((64, 8, 5, 2), (64, 8, 5, 4), (128, 4, 5, 4), (128, 8, 3, 4), (128, 4, 3, 2)),
    ],
}
"""(TILE, TILES, STAGES, num_warps) that ``--sweep`` tries."""
HEADS, KV_HEADS, DIM, PAGE, SELECT = 32, 8, 128, 64, 2047
INTS: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device="cuda")
    if dtype is torch.int32:
        order = torch.stack([torch.randperm(DIM) for _ in range(shape[0] * shape[1])])
        return order[:, : shape[2]].sort(-1).values.view(shape).to(**INTS)
    if dtype is torch.float32:
        return torch.ones(shape, device="cuda")  # ranges
    return torch.randn(shape, device="cuda", dtype=dtype)


def prepare(
    requests: int, tokens: int, scope: str, params: dict[str, Any], select: int
) -> tuple[DoubleSparsityTriton, LayerView]:
    lanes = KV_HEADS if scope == "kv_head" else 1
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), 1, lanes, KV_HEADS // lanes, DIM, torch.bfloat16, PAGE, requests, tokens),
        *(select, 2 * select, 32),
    )
    (entry,) = topkv_register_algorithms()
    given = LabelParams(**params)
    device = torch.device("cuda")

    def stated(*sizes: int) -> TopK:
        setup = TopKSetup(*sizes, device)
        made: TopK = registry().create("topk", entry.defaults["topk"], setup, "triton")
        return made

    algorithm = DoubleSparsityTriton(AlgorithmSetup(model, group, given, device, stated))
    pages = tokens // PAGE
    table = 1 + torch.randperm(requests * pages).view(requests, pages)
    rows = {"token": (1 + requests * pages) * PAGE, "request": requests}
    pools = {
        spec.name: random_pool((rows[spec.grain], *spec.shape), spec.dtype)
        for spec in algorithm.spec().representations
    }
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0),
        table.to(**INTS),
    )
    ring = torch.empty((requests, lanes, 32, KV_HEADS // lanes, 1, DIM), device="cuda")
    ring = ring.to(torch.bfloat16)
    return algorithm, LayerView(0, 0, group, step, ring, ring, pools)


def measure(
    requests: int, tokens: int, scope: str, params: dict[str, Any], select: int = SELECT
) -> dict[str, object]:
    algorithm, layer = prepare(requests, tokens, scope, params, select)
    q = torch.randn(requests, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, requests, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(requests * layer.group.lane_heads, select, **INTS)
    specs = algorithm.spec().representations
    moved = sum(spec.bytes for spec in specs if spec.grain == "token") * tokens * requests
    score = per_call(lambda: algorithm.score(layer, q[:, 0]))
    return {
        "requests": requests,
        "tokens": tokens,
        "scope": scope,
        **params,
        "update_us": round(per_call(lambda: algorithm.update(layer, k, v)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(
            per_call(lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "score_gbs": round(moved / score / 1e3, 1),
    }


def sweep() -> Iterator[dict[str, object]]:
    """Shapes of the score kernel, then the short contexts with the shipped shape."""
    for label, shapes in SHAPES.items():
        for shared in (False, True):
            key, scope = (label == "int4", shared), "shared" if shared else "kv_head"
            shipped = launch.SCORING[key]
            for shape in sorted({shipped, *shapes}):
                launch.SCORING[key] = shape
                cell = {"shape": shape, "shipped": shape == shipped}
                try:
                    yield cell | measure(16, 131072, scope, {"label": label, "channels": 32})
                except Exception as error:  # a shape that does not fit is a result as well
                    yield cell | {"label": label, "scope": scope, "error": str(error)[:200]}
            launch.SCORING[key] = shipped
    for tokens, select in ((4096, 256), (32768, SELECT)):
        for label in SHAPES:
            for requests in (1, 16, 64):
                params = {"label": label, "channels": DIM // 4}
                yield measure(requests, tokens, "kv_head", params, select) | {"select": select}


def variants(requests: Sequence[int], tokens: Sequence[int]) -> Iterator[dict[str, object]]:
    every: list[dict[str, Any]] = [
        {"label": "bf16", "channels": 32},
        {"label": "int4", "channels": 32},
        {"label": "int4", "channels": 64},
        {"label": "bf16", "channels": 128},
    ]
    for scope in ("kv_head", "shared"):
        for params in every:
            for count, length in product(requests, tokens):
                yield measure(count, length, scope, params)


def read_gbs() -> float:
    """Measure the GB/s that a sum over 2 GiB reads: the ceiling for ``score_gbs``."""
    source = torch.zeros(1 << 29, device="cuda")
    return source.numel() * 4 / per_call(source.sum) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--sweep", action="store_true", help="try shapes of the score kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(), "read_gbs": round(read_gbs(), 1)}
    ]
    print(cells[0])
    for cell in sweep() if options.sweep else variants(options.requests, options.tokens):
        cells.append(cell)
        print(cell, flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
