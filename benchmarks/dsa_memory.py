"""Requests and tokens per second of DeepSeek-V3.2's attention in a fixed memory of the GPU.

    python benchmarks/dsa_memory.py --memory 32 --out benchmarks/results/dsa_memory.jsonl

Layer steps of ``dsa_step.py``, for as many requests of 128K tokens as ``--memory`` GiB hold, in
two ways:

* ``host``: rows on the host, a buffer of 4096 of them a request on the GPU;
* ``resident``: all rows on the GPU. Appending, index keys, scores, top-k and attention are the
  same; instead of plan and load one addition turns tokens into rows of the pool.

``requests`` follow from the bytes of all 61 layers. Fewer are run, so that the host has room:
``layer_us`` is the time of a layer in the graph of a step, ``outside_us`` the time of a step
beside its graph, and ``step_ms`` is 61 of the first and one of the second. The model's
projections and experts are not part of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dsa_step import CONTEXT, DIM, LAYERS, SELECT, STEPS, fill, lowered, random, times
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.types import LayerView, Plan

TOKENS = CONTEXT + 2 * STEPS


class Resident:
    """Pools that hold every row of every request, in the place of the transfer engine."""

    def __init__(self, coordinator: SparseCoordinator, slots: list[int]) -> None:
        self.first = torch.tensor(slots, dtype=torch.int32, device="cuda")[:, None] * TOKENS
        self.newest, self.pools = self.first[:, 0], {}
        for path in coordinator.layers:
            rows = path.format.pack(*[random(TOKENS, 1, DIM)] * 2)[0]
            rows = rows.reshape(TOKENS, *path.k_slots.shape[1:])
            pool = rows.repeat(len(slots), 1, 1, 1)
            path.transfer, path.k_slots, path.v_slots = self, pool, pool
            path.lanes.plans[path.loads.number].count.fill_(SELECT)
            self.pools[path.view.layer] = pool
        coordinator.transfers = []

    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        pool = self.pools[layer.layer]
        if layer.index == 0:
            lengths = layer.step.lengths[: len(self.first)].long()
            self.newest = self.first[:, 0] + lengths - 1
        pool.index_copy_(0, self.newest, k.reshape(-1, *pool.shape[1:]))

    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        requests = len(self.first)
        torch.add(ids[:requests], self.first, out=out.slots[:requests])

    def load(self, layer: LayerView, plan: Plan) -> None:
        pass


def measure(way: str, requests: int, options: argparse.Namespace) -> dict[str, object]:
    config = lowered(options.layers, requests, options.backend, options.topk)
    coordinator = SparseCoordinator(config)
    slots = [fill(coordinator) for _ in range(requests)]
    if way == "resident":
        Resident(coordinator, slots)
    inside, outside, hits = times(coordinator, slots, options.drift)
    coordinator.close()
    step = (inside / options.layers * LAYERS + outside) / 1e3
    return {
        "way": way,
        "requests": requests,
        "layers": options.layers,
        "hit_rate": hits if way == "host" else None,
        "layer_us": round(inside / options.layers, 1),
        "outside_us": round(outside, 1),
        "step_ms": round(step, 2),
        "tokens_per_second": round(requests / step * 1e3),
    }


def request_bytes(options: argparse.Namespace) -> dict[str, int]:
    """Bytes on the GPU of a request in all layers."""
    one, two = (
        SparseCoordinator.required_bytes(lowered(LAYERS, n, options.backend, options.topk))
        for n in (1, 2)
    )
    rows, keys = two.host - one.host, two.representation - one.representation
    return {"resident": rows + keys, "host": two.device - one.device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--memory", type=float, default=32, help="GiB for keys and values")
    parser.add_argument("--layers", type=int, default=16, help="that are run")
    parser.add_argument("--backend", default="flashmla")
    parser.add_argument("--topk", default="cuda")
    parser.add_argument("--drift", type=float, default=0.2)
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [
        {
            "device": torch.cuda.get_device_name(),
            **{name: value for name, value in vars(options).items() if name != "out"},
        }
    ]
    for way, size in request_bytes(options).items():
        requests = int(options.memory * 2**30) // size
        cells.append({**measure(way, requests, options), "request_bytes": size})
        print(cells[-1], flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
