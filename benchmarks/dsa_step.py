"""A captured decode step of DeepSeek-V3.2's attention over a cache on the host, and its bytes.

    python benchmarks/dsa_step.py --out benchmarks/results/dsa_step.jsonl

Geometry of V3.2: 128 heads, rows of 512 + 64, an indexer of 64 heads x 128, 2048 of 131072 tokens,
a buffer of 4096 fp8 rows a request. Random rows; index queries drift from step to step, and
``hit_rate`` is the share of the selection that was in the buffer. A layer step is append, index
keys, scores, top-k, plan, load and attention; the projections of the model are not part of it.
Bytes are those of all layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch

from topkv.config import LoweredConfig, SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import Index, IndexerShape, ModelShape

HEADS, DIM, VALUE, INDEX = 128, 576, 512, IndexerShape(64, 128)
CONTEXT, SELECT, BUFFER, CHUNK, STEPS, LAYERS = 131072, 2048, 4096, 8192, 32, 61


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def lowered(layers: int, requests: int, backend: str, topk: str) -> LoweredConfig:
    model = ModelShape(*(layers, HEADS, 1, DIM, torch.bfloat16, 192**-0.5, "mla", VALUE, INDEX))
    tokens = CONTEXT + 2 * STEPS
    config = SparseConfig(
        algorithm="deepseek_dsa",
        backend=backend,
        topk=topk,
        kv_format="fp8",
        budget=SELECT,
        buffer=BUFFER,
        max_requests=requests,
        max_tokens=requests * tokens,
        max_request_tokens=tokens,
    )
    device = torch.device("cuda", 0)
    return lower(config, model, device=device, registry=registry())


def fill(coordinator: SparseCoordinator) -> int:
    """Make a request with a random cache, stored and represented as by a prefill."""
    slot = coordinator.request_begin()
    none = torch.empty(0, device="cuda")
    for start in range(0, CONTEXT, CHUNK):
        coordinator.forward_begin(prefill=[(slot, CHUNK)])
        for path in coordinator.layers:
            rows = path.format.pack(*[random(CHUNK, 1, DIM)] * 2)
            path.transfer.store_chunk(path.view, slot, start, *rows, start + CHUNK, True)
            keys = random(CHUNK, 1, INDEX.head_dim)
            path.algorithm.construct(path.view, slot, start, keys, none, none, none)
            coordinator.forward.attended.add(path.view.layer)  # written, and not attended
        coordinator.forward_end()
    return slot


def times(
    coordinator: SparseCoordinator, slots: list[int], drift: float
) -> tuple[float, float, float]:
    """Microseconds of a captured step, of its graph and beside it; share of rows in the buffer."""
    layers, requests = len(coordinator.layers), len(slots)
    q, rows = random(requests, HEADS, DIM), random(requests, 1, DIM)
    out = torch.empty_like(q[..., :VALUE])
    index_q = random(layers, requests, INDEX.num_heads, INDEX.head_dim)
    index_k = random(layers, requests, INDEX.head_dim)
    weights = torch.rand(layers, requests, INDEX.num_heads, device="cuda")

    def run() -> None:
        for layer in range(layers):
            index = Index(index_q[layer], index_k[layer], weights[layer])
            coordinator.attention(layer, q, rows, rows, index, out)
        coordinator.offload()

    for _ in range(3):
        coordinator.forward_begin(decode=slots)
        run()
        coordinator.forward_end(offloaded=True)
    graph = torch.cuda.CUDAGraph()
    coordinator.forward_begin(decode=slots)
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    coordinator.forward_end(offloaded=True)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs, steps, before = [], [], coordinator.transfers_of(slots)
    for _ in range(STEPS):
        index_q.mul_((1 - drift**2) ** 0.5).add_(random(*index_q.shape), alpha=drift)
        torch.cuda.synchronize()
        started = time.perf_counter()
        coordinator.forward_begin(decode=slots)
        begun.record()
        graph.replay()
        ended.record()
        coordinator.forward_end(offloaded=True)
        torch.cuda.synchronize()
        steps.append((time.perf_counter() - started) * 1e6)
        graphs.append(begun.elapsed_time(ended) * 1e3)
    inside, after = statistics.median(graphs), coordinator.transfers_of(slots)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    share = round(hits / (hits + misses), 3) if hits else 0.0
    return inside, statistics.median(steps) - inside, share


def measure(
    layers: int, requests: int, backend: str, topk: str, drift: float
) -> dict[str, object]:
    coordinator = SparseCoordinator(lowered(layers, requests, backend, topk))
    slots = [fill(coordinator) for _ in range(requests)]
    inside, outside, hits = times(coordinator, slots, drift)
    memory = coordinator.memory()
    coordinator.close()
    return {
        "backend": backend,
        "topk": topk,
        "requests": requests,
        "layers": layers,
        "hit_rate": hits,
        "layer_us": round((inside + outside) / layers, 1),
        "buffer_bytes": memory.buffer,
        "index_bytes": memory.representation,
        "metadata_bytes": memory.metadata,
        "host_bytes": memory.host,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--backends", nargs="+", default=["triton_attention"])
    parser.add_argument("--topk", nargs="+", default=["pivot"])
    parser.add_argument("--drift", type=float, default=0.3)
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [{"device": torch.cuda.get_device_name()}]
    for backend, topk in product(options.backends, options.topk):
        for layers, requests in ((LAYERS, 1), (4, 1), (4, 16)):
            cells.append(measure(layers, requests, backend, topk, options.drift))
            print(cells[-1], flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
