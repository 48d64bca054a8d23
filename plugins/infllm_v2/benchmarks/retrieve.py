"""Time of InfLLM-v2's update and selection per layer-step, and the share of the memory bandwidth.

    python plugins/infllm_v2/benchmarks/retrieve.py --out infllm_v2.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, 63 of the blocks of 64 tokens. Every cell replays a CUDA
graph of ``CALLS`` calls; ``score`` is the three kernels before top-k. The bytes are mean keys,
read once; ``read_gbs`` is what a plain sum reads, and ``times_bound`` scoring over the time that a
sum takes for as many.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import registry
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors
from topkv_infllm_v2.entry import topkv_register_algorithms
from topkv_infllm_v2.launch import InfLLMv2Triton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
HEADS, KV_HEADS, DIM, UNIT, SELECT = 32, 8, 128, 64, 63
INTS: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def prepare(requests: int, tokens: int, scope: str) -> tuple[InfLLMv2Triton, LayerView]:
    """An instance, and a layer whose requests are full of random means."""
    lanes = KV_HEADS if scope == "kv_head" else 1
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), UNIT, lanes, KV_HEADS // lanes, DIM, torch.bfloat16, UNIT, requests),
        *(tokens // UNIT, SELECT, 2 * SELECT, 2),
    )
    (entry,) = topkv_register_algorithms()
    device = torch.device("cuda")

    def stated(*sizes: int) -> TopK:
        made: TopK = registry().create("topk", "radix", TopKSetup(*sizes, device), "triton")
        return made

    algorithm = InfLLMv2Triton(AlgorithmSetup(model, group, entry.parameters(), device, stated))
    pages = tokens // UNIT
    (spec,) = algorithm.representations()
    means = torch.randn((1 + requests * pages, *spec.shape), **BF16)
    table = 1 + torch.randperm(requests * pages).view(requests, pages)
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0),
        table.to(**INTS),
    )
    ring = torch.randn((requests, lanes, 2, KV_HEADS // lanes, UNIT, DIM), **BF16)
    return algorithm, LayerView(0, 0, group, step, ring, ring, {"means": means})


def measure(requests: int, tokens: int, scope: str, read: float) -> dict[str, object]:
    algorithm, layer = prepare(requests, tokens, scope)
    q = torch.randn((requests, 1, HEADS, DIM), **BF16)
    k = torch.randn((requests, KV_HEADS, DIM), **BF16)
    ids = torch.empty((requests * layer.group.lane_heads, SELECT), **INTS)
    moved = sum(spec.bytes for spec in algorithm.representations()) * tokens // UNIT * requests
    score = per_call(lambda: algorithm.lane_scores(layer, q[:, 0]))
    bound = moved / read / 1e3
    return {
        "requests": requests,
        "tokens": tokens,
        "scope": scope,
        "update_us": round(per_call(lambda: algorithm.update(layer, k, k)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(
            per_call(lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "bound_us": round(bound, 2),
        "times_bound": round(score / bound, 2),
    }


def cells(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    source = torch.zeros(1 << 29, device="cuda")
    read = source.numel() * 4 / per_call(source.sum) / 1e3
    yield {"device": torch.cuda.get_device_name(), "read_gbs": round(read, 1)}
    for tokens in options.tokens:
        for scope in ("kv_head", "shared"):
            for requests in options.requests:
                yield measure(requests, tokens, scope, read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
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
