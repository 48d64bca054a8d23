"""Time of a long prompt in chunks: all layers resident, and history on the host.

    python benchmarks/prefill.py --out prefill.jsonl

A prompt of 128K tokens runs through ``--layers`` layers of the sizes of Llama-3.1-8B: products of
random bfloat16 weights, which all layers share, around the attention of a coordinator (Quest, no
layer dense). Norms and positions are left out; ``topkv bench`` measures the first token of a whole
model.

* ``resident``: history in GPU memory.
* ``in time``: history on the host, fetched when it is attended, on the stream that attends it and
  by as many programs as there are blocks of tokens and heads.
* ``ahead``: fetched ahead, as the core does; ``--programs`` is the number of programs that fetch.
* ``ahead fp8``: fetched ahead with ``host_format: fp8``.

A line has the median over ``--repeats``, the ratio to ``resident``, the bytes of history that were
read and their rate over the whole time (of ``resident`` they do not cross the link), and the most
GPU memory that was taken beside weights, the coordinator and the prompt's rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.transfer.triton import FETCH_PROGRAMS
from topkv.types import ModelShape
from topkv_testing.machines.delays import fetched_in_time


@frozen
class Sizes:
    """Sizes of a model's layer: heads, kv-heads and their dim, width, and width of the MLP."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    mlp: int


LLAMA = Sizes(32, 8, 128, 4096, 14336)
TINY = Sizes(4, 2, 64, 256, 512)


class Decoder:
    """Layers that share their weights, around a coordinator."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[0] ** -0.5

        self.sizes = sizes
        query = sizes.heads * sizes.dim
        self.rows = (query, sizes.kv_heads * sizes.dim, sizes.kv_heads * sizes.dim)
        self.qkv, self.out = weight(sizes.hidden, sum(self.rows)), weight(query, sizes.hidden)
        self.up, self.down = weight(sizes.hidden, 2 * sizes.mlp), weight(sizes.mlp, sizes.hidden)

    def chunk(self, coordinator: SparseCoordinator, slot: int, x: Tensor) -> None:
        """Run one forward over the rows ``[m, hidden]`` of a chunk."""
        coordinator.forward_begin(prefill=[(slot, len(x))])
        for layer in coordinator.model.layers:
            rows = (x @ self.qkv).split(self.rows, -1)
            q, k, v = (each.unflatten(-1, (-1, self.sizes.dim)) for each in rows)
            x = torch.addmm(x, coordinator.attention(layer, q, k, v).flatten(1), self.out)
            gate, up = (x @ self.up).chunk(2, -1)
            x = torch.addmm(x, torch.nn.functional.silu(gate) * up, self.down)
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        coordinator.forward_end()

    def prompt(self, coordinator: SparseCoordinator, x: Tensor, chunk: int) -> float:
        """Run a prompt of rows ``[n, hidden]``; return its seconds."""
        slot = coordinator.request_begin()
        synchronize(x.device)
        began = time.perf_counter()
        for rows in x.split(chunk):
            self.chunk(coordinator, slot, rows)
        synchronize(x.device)
        passed = time.perf_counter() - began
        coordinator.request_end(slot)
        return passed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make(name: str, options: argparse.Namespace, sizes: Sizes) -> SparseCoordinator:
    """Make the coordinator of a contestant."""
    device = torch.device(options.device)
    model = ModelShape(
        options.layers, sizes.heads, sizes.kv_heads, sizes.dim, torch.bfloat16, sizes.dim**-0.5
    )
    layers: dict[str, Any] = {"dense_layers": []}
    if name == "resident":
        layers = {"layers": {"0-": "resident"}}
    config = SparseConfig(
        algorithm="quest",
        backend="triton_attention",
        max_requests=1,
        max_tokens=options.context,
        host_format="fp8" if name.endswith("fp8") else "model",
        **layers,
    )
    made = SparseCoordinator(lower(config, model, device=device, registry=registry()))
    return fetched_in_time(made) if name == "in time" else made


def measured(
    decoder: Decoder, coordinator: SparseCoordinator, x: Tensor, chunk: int, repeats: int
) -> dict[str, Any]:
    """Measure time, memory and bytes read of a prompt of rows ``[n, hidden]``."""
    cuda, before = x.is_cuda, 0
    decoder.prompt(coordinator, x[: 2 * chunk], chunk)  # compiles and allocates
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(decoder.prompt(coordinator, x, chunk) for _ in range(repeats))
    group = coordinator.manager.groups[0]
    token = group.host_entry_bytes * group.lane_heads // group.unit
    read = coordinator.model.num_layers * token * sum(range(0, len(x), chunk)) / 1e9
    line = {"seconds": seconds, "history_gb": read, "history_gbs": read / seconds}
    if cuda:
        line["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return line


def cells(options: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield a line for each contestant and size of chunks."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    decoder = Decoder(sizes, device)
    x = torch.randn(options.context, sizes.hidden, device=device, dtype=torch.bfloat16)
    contestants = {
        "resident": [FETCH_PROGRAMS],
        "in time": [2**16],
        "ahead": options.programs,
        "ahead fp8": options.programs,
    }
    for chunk in options.chunks:
        resident = None
        for name, programs in contestants.items():
            coordinator = make(name, options, sizes)
            for each in programs:
                for transfer in coordinator.transfers:
                    transfer.fetch_programs = each
                line = measured(decoder, coordinator, x, chunk, options.repeats)
                resident = resident or line["seconds"]
                head = {"what": "prefill", "name": name, "chunk": chunk, "programs": each}
                shape = {"layers": options.layers, "context": options.context}
                yield {**head, **shape, **line, "ratio": line["seconds"] / resident}
            coordinator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--tiny", action="store_true", help="a small layer, to try the script")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--programs", type=int, nargs="+", default=[FETCH_PROGRAMS])
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    lines = []
    with torch.inference_mode():
        for line in cells(options, TINY if options.tiny else LLAMA):
            lines.append(line)
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}
            print(shown, flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
