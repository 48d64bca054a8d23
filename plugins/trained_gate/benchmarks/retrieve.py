"""Time of the block index's update and selection per layer-step, and of a prompt's last rows.

    python plugins/trained_gate/benchmarks/retrieve.py --out trained_gate.jsonl

4 index heads of 128, bfloat16, blocks of 128 tokens, 16 of them attended, as in MiniMax-M3. Every
cell replays a CUDA graph of ``CALLS`` calls; ``score`` is the kernel before top-k. The bytes are
the keys, read once; ``read_gbs`` is what a plain sum reads, and ``times_bound`` scoring over the
time that a sum takes for as many. ``prompt`` selects for the last 512 rows of one request.
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
from topkv.types import GroupShape, IndexerShape, LayerView, ModelShape, Selection, StepTensors
from topkv_testing.timing import graph_us
from topkv_trained_gate.entry import topkv_register_algorithms
from topkv_trained_gate.launch import PROMPT_ROWS, TrainedGateTriton

CALLS, REPEATS = 10, 9
HEADS, DIM, UNIT, PAGE, BLOCKS = 4, 128, 128, 128, 16
INTS: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def prepare(requests: int, tokens: int) -> tuple[TrainedGateTriton, LayerView]:
    """An instance, and a layer whose requests are full of random keys."""
    indexer = IndexerShape(HEADS, DIM)
    model = ModelShape(1, 64, HEADS, DIM, torch.bfloat16, DIM**-0.5, indexer=indexer)
    group = GroupShape(
        *((0,), UNIT, HEADS, 1, DIM, torch.bfloat16, PAGE, requests, tokens // UNIT),
        *(BLOCKS - 1, 2 * BLOCKS, 2),
    )
    (entry,) = topkv_register_algorithms()
    device = torch.device("cuda")

    def stated(*sizes: int) -> TopK:
        made: TopK = registry().create("topk", "radix", TopKSetup(*sizes, device), "triton")
        return made

    algorithm = TrainedGateTriton(AlgorithmSetup(model, group, entry.parameters(), device, stated))
    pages = tokens // PAGE
    index = torch.randn(((1 + requests * pages) * PAGE, DIM), **BF16)
    table = 1 + torch.randperm(requests * pages).view(requests, pages)
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.ones_like(full), full * 0),
        table.to(**INTS),
    )
    ring = torch.empty((requests, HEADS, 2, 1, UNIT, DIM), **BF16)
    return algorithm, LayerView(0, 0, group, step, ring, ring, {"index": index})


def measure(requests: int, tokens: int, read: float) -> dict[str, object]:
    algorithm, layer = prepare(requests, tokens)
    q = torch.randn((requests, 1, HEADS, DIM), **BF16)
    k = torch.randn((requests, 1, DIM), **BF16)
    ids = torch.empty((requests * HEADS, BLOCKS - 1), **INTS)
    scores, ends = algorithm.scores, algorithm.ends
    rows = (requests, 0, 0)
    score = per_call(
        lambda: algorithm._score(layer, q[:, 0], rows, scores, ends, algorithm.steps[0])
    )
    bound = 2 * DIM * tokens * requests / read / 1e3
    cell = {
        "requests": requests,
        "tokens": tokens,
        "update_us": round(per_call(lambda: algorithm.update(layer, k, k)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(
            per_call(lambda: algorithm.retrieve_topk(layer, q, None, Selection(ids))), 2
        ),
        "bound_us": round(bound, 2),
        "times_bound": round(score / bound, 2),
    }
    if requests == 1:
        q = torch.randn((PROMPT_ROWS, HEADS, DIM), **BF16)
        ids = torch.empty((PROMPT_ROWS, HEADS, BLOCKS), **INTS)
        start = tokens - PROMPT_ROWS
        prompt = per_call(lambda: algorithm.retrieve_prompt(layer, 0, start, q, None, ids))
        cell["prompt_us"] = round(prompt, 2)
    return cell


def cells(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    source = torch.zeros(1 << 29, device="cuda")
    read = source.numel() * 4 / per_call(source.sum) / 1e3
    yield {"device": torch.cuda.get_device_name(), "read_gbs": round(read, 1)}
    for tokens in options.tokens:
        for requests in options.requests:
            yield measure(requests, tokens, read)


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
