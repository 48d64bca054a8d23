"""Scoring and selection of every algorithm per layer-step, through the host pool, in a graph.

    python benchmarks/selection.py --out benchmarks/results/selection.jsonl
    python benchmarks/selection.py --stages --out benchmarks/results/stages.jsonl

One sparse layer of Llama-3.1-8B's geometry (32 query and 8 kv-heads x 128, bf16) in a coordinator:
random keys and values fill the host pool chunk by chunk, as a prefill would, and decode rows
follow. Captured and replayed: ``score_us`` the scoring kernels; ``select_us`` update and
selection; ``layer_us`` append, update, selection, plan, load and attention where all selected
units are in the buffer. ``bytes`` is what scoring must read, ``bound_us`` the time that a plain
sum of the same run takes for as many; ``times_bound`` is scoring over that. With ``--stages`` each
row is Quest or ParisKV with other stages behind it, and bytes and bound are of what the stages
read: all units where they correct, candidates where they refine. The cost of a stage is
the difference of its ``layer_us`` to that of no stage.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from topkv.assembly.stages import Staged
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.decode.layers import LayerPath
from topkv.plugins import registry
from topkv.plugins.contract import has_hook
from topkv.types import ModelShape
from topkv_testing.timing import graph_us

HEADS, KV_HEADS, DIM, CHUNK, CALLS, REPEATS = 32, 8, 128, 4096, 10, 9
MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
LONG, SHORT = (32768, 131072), (4096,)


@frozen
class Case:
    """An algorithm with parameters, and the contexts and budget in tokens that it is timed at.

    Attributes:
        more: further settings of ``SparseConfig``, such as stages.
    """

    algorithm: str
    params: dict[str, Any]
    contexts: tuple[int, ...] = LONG
    budget: int = 2048
    more: dict[str, Any] = field(factory=dict)


CASES = [
    Case("quest", {}),
    Case("quest", {"metadata": "int8"}),
    Case("double_sparsity", {"label": "bf16", "channels": 32}),
    Case("double_sparsity", {}),
    Case("double_sparsity", {"label": "bf16", "channels": 32}, SHORT, 256),
    Case("double_sparsity", {}, SHORT, 256),
    Case("pariskv", {}),
    Case("infllm_v2", {}, budget=4096),
    Case("clusterkv", {}),
    Case("snapkv", {"generated": 32}),
    Case("streaming_llm", {}),
]
PRUNED = {"stages": [{"name": "top_p"}]}
TWILIGHT = {"stages": [{"name": "top_p", "params": {"p": 0.95, "widen": 4}}]}
STAGED = [
    Case("quest", {}, more=more)
    for more in (
        {},
        PRUNED,
        {"stages": [{"name": "top_p", "params": {"widen": 2}}]},
        TWILIGHT,
        {"stages": [{"name": "head_sparsity"}]},
        {"stages": [{"name": "residual"}]},
        {"stages": [{"name": "skip_softmax"}]},
        {"stages": [{"name": "keydiff", "params": {"tokens": 131072 + 4096}}]},
    )
] + [Case("pariskv", {}, more=more) for more in ({}, PRUNED, TWILIGHT)]


def per_call(call: Callable[[], object]) -> float:
    return graph_us(*[call] * CALLS, repeats=REPEATS)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def make(case: Case, requests: int) -> SparseCoordinator:
    tokens = max(case.contexts) + 64
    config = SparseConfig(
        algorithm=case.algorithm,
        params=case.params,
        backend="triton_attention",
        budget=case.budget,
        dense_layers=(),
        **case.more,
        max_requests=requests,
        max_tokens=requests * tokens,
        max_request_tokens=tokens,
    )
    device = torch.device("cuda", 0)
    return SparseCoordinator(lower(config, MODEL, device=device, registry=registry()))


def fill(coordinator: SparseCoordinator, slot: int, until: int) -> None:
    """Store and represent random keys and values up to ``until`` tokens; attends nothing."""
    (path,) = coordinator.layers
    start = int(coordinator.requests.length[slot])
    lse = torch.zeros(CHUNK, HEADS, device="cuda")
    while start < until:
        tokens = min(CHUNK, until - start)
        coordinator.forward_begin(prefill=[(slot, tokens)])
        q, k, v = random(tokens, HEADS, DIM), *(random(tokens, KV_HEADS, DIM) for _ in range(2))
        path.transfer.store_chunk(path.view, slot, start, k, v, start + tokens, True)
        path.algorithm.construct(path.view, slot, start, k, v, q, lse[:tokens])
        coordinator.forward.attended.add(path.view.layer)  # written, and not attended
        coordinator.forward_end()
        start += tokens


def must_read(path: LayerPath, tokens: int, slots: list[int]) -> int:
    """Bytes that scoring the closed tokens of the requests has to read."""
    total = 0
    for spec in path.algorithm.spec().representations:
        if spec.grain != "request":
            per_unit = path.view.group.unit if spec.grain == "unit" else 1
            total += spec.bytes * (tokens // per_unit) * len(slots)
    pools = path.view.pools
    if "centroids" in pools:
        row = pools["centroids"].shape[-1] * pools["centroids"].element_size()
        total += row * int(pools["state"][slots, 2].sum()) * KV_HEADS
    return total


def stages_read(path: LayerPath, tokens: int, batch: int) -> int:
    """Bytes of their representations that stages have to read."""
    total, links = 0, path.algorithm.links if isinstance(path.algorithm, Staged) else ()
    for link in links:
        group, units = link.group, tokens // link.group.unit
        if link.candidates is not None:
            units = min(units, link.candidates.shape[1])
        elif not has_hook(link.stage, "correct"):
            units = 0
        for spec in link.spec.representations:
            if spec.grain != "request":
                total += spec.bytes * units * (1 if spec.grain == "unit" else group.unit) * batch
    return total


def scorer(path: LayerPath, q: torch.Tensor) -> Callable[[], object] | None:
    """Return a call of the scoring kernels alone, where an algorithm has some."""
    names = ("lane_scores", "score")  # of a ScoredUnits, and of others
    found = [getattr(path.algorithm, name) for name in names if hasattr(path.algorithm, name)]
    return partial(found[0], path.view, q) if found else None


def cell(
    coordinator: SparseCoordinator, slots: list[int], tokens: int, read_gbs: float
) -> dict[str, object]:
    (path,) = coordinator.layers
    q, k, v = (random(len(slots), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.empty_like(q)
    coordinator.forward_begin(decode=slots)

    def select() -> None:
        path.algorithm.update(path.view, k[:, None], v[:, None])
        path.algorithm.retrieve_topk(path.view, q.unsqueeze(1), None, path.lanes.room)

    score = scorer(path, q)
    staged = isinstance(path.algorithm, Staged)
    moved = stages_read(path, tokens, len(slots)) if staged else must_read(path, tokens, slots)
    bound = moved / read_gbs / 1e3
    scoring = per_call(score) if score else None
    figures: dict[str, object] = {
        "score_us": scoring and round(scoring, 2),
        "select_us": round(per_call(select), 2),
        "layer_us": round(per_call(partial(coordinator.attention, 0, q, k, v, out=out)), 2),
        "bytes": moved,
        "bound_us": round(bound, 2),
        "times_bound": scoring and bound and round(scoring / bound, 2),
    }
    coordinator.forward_abort()
    return figures


def measure(case: Case, batches: list[int], read_gbs: float) -> Iterator[dict[str, object]]:
    coordinator = make(case, max(batches))
    slots = [coordinator.request_begin() for _ in range(max(batches))]
    for context in case.contexts:
        for slot in slots:
            fill(coordinator, slot, context)
        for batch in batches:
            yield {
                "algorithm": case.algorithm,
                "params": case.params,
                "tokens": context,
                "budget": case.budget,
                **case.more,
                "requests": batch,
                "host_gib": round(coordinator.memory().host / 2**30, 2),
                **cell(coordinator, slots[:batch], context, read_gbs),
            }
    coordinator.close()


def read_gbs() -> float:
    """GB/s that a sum over 2 GiB reads: the ceiling for scoring."""
    source = torch.zeros(1 << 29, device="cuda")
    return source.numel() * 4 / per_call(source.sum) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--only", nargs="+", help="algorithms to time")
    parser.add_argument("--stages", action="store_true", help="what stages cost")
    options = parser.parse_args()
    torch.manual_seed(0)
    ceiling = read_gbs()
    lines: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(), "read_gbs": round(ceiling, 1)}
    ]
    print(lines[0])
    for case in STAGED if options.stages else CASES:
        if options.only and case.algorithm not in options.only:
            continue
        for line in measure(case, sorted(options.requests), ceiling):
            lines.append(line)
            print(line, flush=True)
            if options.out:
                options.out.write_text("".join(json.dumps(row) + "\n" for row in lines))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
