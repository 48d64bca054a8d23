"""Time of the indexer's update and selection per layer-step, and the distance to the bandwidth.

    python plugins/deepseek_dsa/benchmarks/retrieve.py --out deepseek_dsa.jsonl

64 index heads of 128, bfloat16, 2048 of 32K and of 128K tokens, keys in fp8 and in bfloat16.
Every cell replays a CUDA graph of ``CALLS`` calls; ``score`` is the two kernels before top-k. The
bytes are the keys with their scales, read once; ``read_gbs`` is what a plain sum reads, and
``times_bound`` is scoring over the time that a sum takes for as many. ``--topk`` names further
implementations of exact top-k to select with: ``topk_..._us`` is scoring and selection by one, and
``topk_..._times_bound`` that over the time of the sum. ``--sweep`` instead tries shapes of the
score kernel; ``--prompt`` times the selection of the last 256 rows of a prompt; ``--queries N``
gives each request N queries.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import registry
from topkv.types import GroupShape, IndexerShape, LayerView, ModelShape, Selection, StepTensors
from topkv_deepseek_dsa import launch
from topkv_deepseek_dsa.entry import IndexerParams, topkv_register_algorithms
from topkv_deepseek_dsa.launch import DeepSeekDSATriton
from topkv_testing.timing import graph_us

CALLS, REPEATS = 10, 9
SHAPES = [
    *((64, 3, 4), (64, 4, 4), (64, 6, 4), (64, 8, 4), (128, 3, 4), (128, 4, 4), (128, 6, 4)),
    *((128, 4, 8), (256, 3, 4), (256, 4, 8)),
]
"""(TILE, STAGES, num_warps) that ``--sweep`` tries, each with pages of 64 and of 256 tokens."""
TILES, RUNNING = (11, 22, 44, 88), (2, 3, 4, 6)
"""Most tiles of a program, and programs of a multiprocessor, that ``--sweep`` tries."""
HEADS, DIM, PAGE, SELECT, LATENT = 64, 128, 64, 2048, 576
INTS: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def prepare(
    requests: int, tokens: int, keys: str, page: int = PAGE, most: int = 1
) -> tuple[DeepSeekDSATriton, LayerView]:
    """An instance, and a layer whose requests are full of random keys."""
    model = ModelShape(
        num_layers=1,
        num_heads=128,
        num_kv_heads=1,
        head_dim=LATENT,
        dtype=torch.bfloat16,
        scale=192**-0.5,
        attention="mla",
        value_dim=512,
        indexer=IndexerShape(HEADS, DIM),
    )
    group = GroupShape(
        layers=(0,),
        unit=1,
        lane_heads=1,
        heads_per_lane=1,
        head_dim=LATENT,
        dtype=torch.bfloat16,
        page_tokens=page,
        max_requests=requests,
        max_units=tokens,
        select=SELECT,
        buffer_slots=2 * SELECT,
        ring_slots=32,
        planes=1,
    )
    (entry,) = topkv_register_algorithms()
    given = IndexerParams(keys=keys)
    device = torch.device("cuda")

    def stated(*sizes: int) -> TopK:
        setup = TopKSetup(*sizes, device)
        made: TopK = registry().create("topk", entry.defaults["topk"], setup, "triton")
        return made

    setup = AlgorithmSetup(model, group, given, device, stated, most)
    algorithm = DeepSeekDSATriton(setup)
    pages = tokens // page
    table = 1 + torch.randperm(requests * pages).view(requests, pages)
    (spec,) = algorithm.spec().representations
    shape = ((1 + requests * pages) * page, *spec.shape)
    pool = torch.zeros(shape, dtype=spec.dtype, device="cuda")
    full = torch.full((requests,), tokens, **INTS)
    step = StepTensors(
        *(torch.arange(requests, **INTS), full, full, torch.full_like(full, most), full * 0),
        table.to(**INTS),
    )
    ring = torch.zeros((requests, 1, 32, 1, 1, LATENT), device="cuda", dtype=torch.bfloat16)
    layer = LayerView(0, 0, group, step, ring, ring, {"index": pool})
    for slot in range(requests):
        k = torch.randn(tokens, 1, DIM, device="cuda", dtype=torch.bfloat16)
        algorithm.construct(layer, slot, 0, k, k, k, k)
    return algorithm, layer


def queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return q, torch.randn(rows, HEADS, device="cuda")


def measure(
    requests: int,
    tokens: int,
    keys: str,
    bandwidth: float,
    page: int = PAGE,
    topks: Sequence[str] = (),
    most: int = 1,
) -> dict[str, object]:
    algorithm, layer = prepare(requests, tokens, keys, page, most)
    q, weights = queries(requests * most)
    k = torch.randn(requests, most, 1, DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.empty(requests, SELECT, **INTS)
    (spec,) = algorithm.spec().representations
    moved = spec.bytes * tokens * requests
    launcher = algorithm.launcher
    score = per_call(lambda: launcher.score(layer, q, weights))
    bound = moved / bandwidth / 1e3

    def select() -> None:
        rows = (x.unflatten(0, (requests, most)) for x in (q, weights))
        algorithm.retrieve_topk(layer, *rows, Selection(ids))

    taken = per_call(select)
    chosen, others = ids.clone(), {}
    for name in topks:
        setup = TopKSetup(requests, tokens, SELECT, ids.device)
        algorithm.work = registry().create("topk", name, setup, "triton")
        ids.fill_(-7)
        us = per_call(select)
        if not torch.equal(ids, chosen):
            raise SystemExit(f"topk {name} selected other tokens")
        others[f"topk_{name}_us"] = round(us, 2)
        others[f"topk_{name}_times_bound"] = round(us / bound, 2)
    return {
        "requests": requests,
        "tokens": tokens,
        "keys": keys,
        "queries": most,
        "update_us": round(per_call(lambda: algorithm.update(layer, k, k)), 2),
        "score_us": round(score, 2),
        "retrieve_us": round(taken, 2),
        "bytes": moved,
        "bound_us": round(bound, 2),
        "times_bound": round(score / bound, 2),
        "retrieve_times_bound": round(taken / bound, 2),
        **others,
        "tflops": round(2 * HEADS * DIM * tokens * requests * most / score / 1e6, 1),
    }


def sweep(bandwidth: float) -> Iterator[dict[str, object]]:
    """Shapes of the score kernel and of pages, early starts, then what programs share."""
    for keys in ("fp8", "bf16"):
        shipped = launch.SCORING[keys]
        for page in (64, 256):
            for shape in sorted({shipped, *SHAPES}):
                launch.SCORING[keys] = shape
                cell = {"shape": shape, "page": page, "shipped": shape == shipped}
                try:
                    yield cell | measure(16, 131072, keys, bandwidth, page)
                except Exception as error:  # a shape that does not fit is a result as well
                    yield cell | {"keys": keys, "error": str(error)[:200]}
        launch.SCORING[keys] = shipped
        early, ahead = launch.EARLY, launch.AHEAD
        for launch.EARLY, launch.AHEAD in ((False, 0), (True, 0), (True, 1), (True, 2), (True, 4)):
            for tokens in (32768, 131072):
                cell = {"early": launch.EARLY, "ahead": launch.AHEAD}
                yield cell | measure(16, tokens, keys, bandwidth)
        launch.EARLY, launch.AHEAD = early, ahead
        most, running = launch.TILES, launch.RUNNING[keys]
        for launch.RUNNING[keys] in RUNNING:
            for launch.TILES in TILES:
                tried = (launch.RUNNING[keys], launch.TILES)
                cell = {"running_tiles": tried, "shipped": tried == (running, most)}
                for requests, tokens in ((1, 131072), (16, 32768), (16, 131072), (64, 32768)):
                    yield cell | measure(requests, tokens, keys, bandwidth)
        launch.TILES, launch.RUNNING[keys] = most, running


def prompts(bandwidth: float) -> Iterator[dict[str, object]]:
    """The last 256 rows of a prompt; they share the keys, so that products are the bound."""
    rows = 256
    for keys in ("fp8", "bf16"):
        for tokens in (32768, 131072):
            algorithm, layer = prepare(1, tokens, keys)
            q, weights = queries(rows)
            ids = torch.empty(rows, 1, SELECT, **INTS)
            start = tokens - rows

            def select(run: Any = (algorithm, layer, start, q, weights, ids)) -> None:
                made, view, first, *rest = run
                made.retrieve_prompt(view, 0, first, *rest)

            taken = graph_us(select, repeats=REPEATS)
            yield {
                "prompt_rows": rows,
                "tokens": tokens,
                "keys": keys,
                "prompt_us": round(taken, 2),
                "tflops": round(2 * HEADS * DIM * tokens * rows / taken / 1e6, 1),
            }


def variants(
    requests: Sequence[int],
    tokens: Sequence[int],
    topks: Sequence[str],
    bandwidth: float,
    most: int,
) -> Iterator[dict[str, object]]:
    for keys in ("fp8", "bf16"):
        for context in tokens:
            for count in requests:
                yield measure(count, context, keys, bandwidth, topks=topks, most=most)


def read_gbs() -> float:
    """Measure the GB/s that a sum over 2 GiB reads: the bandwidth of the bound."""
    source = torch.zeros(1 << 29, device="cuda")
    return source.numel() * 4 / per_call(source.sum) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--queries", type=int, default=1, help="of each request")
    parser.add_argument("--topk", nargs="+", default=[], help="select with these as well")
    parser.add_argument("--sweep", action="store_true", help="try shapes of the score kernel")
    parser.add_argument("--prompt", action="store_true", help="time rows of a prompt")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_gbs()
    cells: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(), "read_gbs": round(bandwidth, 1)}
    ]
    print(cells[0])
    if options.sweep:
        chosen = sweep(bandwidth)
    elif options.prompt:
        chosen = prompts(bandwidth)
    else:
        chosen = variants(
            options.requests, options.tokens, options.topk, bandwidth, options.queries
        )
    for cell in chosen:
        cells.append(cell)
        print(cell, flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
