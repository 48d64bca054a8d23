"""One captured decode step of all attention layers: topkv beside a cache that stays on the GPU.

    python benchmarks/decode_step.py --out benchmarks/results/decode_step.jsonl

Geometry of Llama-3.1-8B (32 layers, 32 query and 8 kv-heads x 128, bf16), random keys, queries
that drift from step to step. Wall-clock time of ``forward_begin``, graph replay and
``forward_end`` together, medians over the steps; the projections and MLPs of the model are not
part of it. ``--host-format fp8`` for entries that are coded on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape

LAYERS, HEADS, KV_HEADS, DIM, STEPS, CHUNK = 32, 32, 8, 128, 64, 8192
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
DRIFT = 0.15


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def make(context: int, requests: int, dense: bool, host_format: str) -> SparseCoordinator:
    tokens = context + 2 * STEPS
    config = SparseConfig(
        algorithm="quest",
        backend="triton_attention",
        max_requests=requests,
        max_tokens=requests * tokens,
        max_request_tokens=tokens,
        layers={"0-": "resident"} if dense else None,
        host_format=host_format,
    )
    device = torch.device("cuda", 0)
    return SparseCoordinator(lower(config, MODEL, device=device, registry=registry()))


def fill(coordinator: SparseCoordinator, context: int) -> int:
    """Make a request with a random cache, stored and represented as by a prefill."""
    slot = coordinator.request_begin()
    lse = torch.zeros(CHUNK, HEADS, device="cuda")
    for start in range(0, context, CHUNK):
        coordinator.forward_begin(prefill=[(slot, CHUNK)])
        for path in coordinator.layers:
            k, v = (random(CHUNK, KV_HEADS, DIM) for _ in range(2))
            k, v = path.host.round(k, v)
            path.transfer.store_chunk(path.view, slot, start, k, v, start + CHUNK, True)
            if path.algorithm:
                path.algorithm.construct(path.view, slot, start, k, v, k, lse)
            coordinator.forward.attended.add(path.view.layer)  # written, and not attended
        coordinator.forward_end()
    return slot


def measure(
    context: int, requests: int, dense: bool, host_format: str = "model"
) -> dict[str, object]:
    coordinator = make(context, requests, dense, host_format)
    slots = [fill(coordinator, context) for _ in range(requests)]
    q = random(LAYERS, requests, HEADS, DIM)
    k, v = (random(LAYERS, requests, KV_HEADS, DIM) for _ in range(2))
    out = torch.empty_like(q)

    def run() -> None:
        for layer in range(LAYERS):
            coordinator.attention(layer, q[layer], k[layer], v[layer], out=out[layer])
        coordinator.offload()

    def step(graph: torch.cuda.CUDAGraph | None) -> None:
        coordinator.forward_begin(decode=slots)
        if graph is None:
            run()
        else:
            graph.replay()
        coordinator.forward_end(offloaded=True)

    def drift() -> None:
        q.mul_((1 - DRIFT**2) ** 0.5).add_(random(*q.shape), alpha=DRIFT)

    for _ in range(3):
        step(None)
        drift()
    graph = torch.cuda.CUDAGraph()
    coordinator.forward_begin(decode=slots)
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    coordinator.forward_end(offloaded=True)
    before = coordinator.transfers_of(slots)
    times = []
    for _ in range(STEPS):
        drift()
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(graph)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    after, memory = coordinator.transfers_of(slots), coordinator.memory()
    units = after.hits + after.misses - before.hits - before.misses
    result = {
        "what": "dense on the GPU" if dense else "topkv, quest",
        "host_format": host_format,
        "context": context,
        "requests": requests,
        "ms": statistics.median(times),
        "hit_rate": (after.hits - before.hits) / units if units else None,
        "device_kv_gib": memory.device_kv / 2**30,
        "representation_gib": memory.representation / 2**30,
        "metadata_gib": memory.metadata / 2**30,
        "host_gib": memory.host / 2**30,
    }
    coordinator.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host-format", choices=["model", "fp8"], default="model")
    options = parser.parse_args()
    rows = []
    for context, requests in ((32768, 1), (32768, 4), (131072, 1)):
        for dense in (True, False):
            rows.append(measure(context, requests, dense, options.host_format))
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()},
                flush=True,
            )
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
