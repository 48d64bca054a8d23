"""Time of clustering a prompt, by the chunks that it comes in; one layer, from the host tier.

    python plugins/clusterkv/benchmarks/prompt.py --out clusterkv_prompt.jsonl

32 q-heads, 8 kv-heads, D = 128, bfloat16, random keys. ``prompt_ms`` is what all chunks take to be
stored and clustered, without attention; ``first_step_ms`` what stands between the last chunk and
the first step of decode: clusters that are still to be made, and the first selection and load.
``waiting`` counts the tokens that were clustered there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape

HEADS, KV_HEADS, DIM = 32, 8, 128
CHUNKS = (1024, 2048, 8192, 16384)


def make(tokens: int) -> SparseCoordinator:
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    config = SparseConfig(
        algorithm="clusterkv",
        backend="triton_attention",
        budget=2048,
        dense_layers=(),
        max_requests=1,
        max_tokens=tokens + 64,
        max_request_tokens=tokens + 64,
    )
    device = torch.device("cuda", 0)
    return SparseCoordinator(lower(config, model, device=device, registry=registry()))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def measure(coordinator: SparseCoordinator, tokens: int, chunk: int) -> dict[str, object]:
    (path,) = coordinator.layers
    slot = coordinator.request_begin()
    lse = torch.zeros(chunk, HEADS, device="cuda")
    q, k, v = (
        random(chunk, HEADS, DIM),
        random(tokens, KV_HEADS, DIM),
        random(chunk, KV_HEADS, DIM),
    )
    torch.cuda.synchronize()
    began = perf_counter()
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        keys, end = k[start : start + count], start + count
        coordinator.forward_begin(prefill=[(slot, count)])
        path.transfer.store_chunk(path.view, slot, start, keys, v[:count], end, True)
        path.algorithm.construct(path.view, slot, start, keys, v[:count], q[:count], lse[:count])
        coordinator.forward_end()
    torch.cuda.synchronize()
    read = perf_counter()
    waiting = tokens - int(path.view.pools["state"][slot, 1])
    torch.cuda.synchronize()
    before = perf_counter()
    coordinator.forward_begin(decode=[slot])
    torch.cuda.synchronize()
    after = perf_counter()
    coordinator.attention(0, q[:1], k[:1], v[:1])
    coordinator.forward_end()
    coordinator.request_end(slot)
    return {
        "tokens": tokens,
        "chunk": chunk,
        "prompt_ms": round((read - began) * 1e3, 1),
        "first_step_ms": round((after - before) * 1e3, 1),
        "waiting": waiting,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 131072 - 3072])
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [{"device": torch.cuda.get_device_name()}]
    print(cells[0])
    for tokens in options.tokens:
        coordinator = make(tokens)
        for chunk in (CHUNKS[0], CHUNKS[-1]):
            measure(coordinator, tokens, chunk)  # compiles
        for chunk in CHUNKS:
            cells.append(measure(coordinator, tokens, chunk))
            print(cells[-1], flush=True)
        coordinator.close()
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
