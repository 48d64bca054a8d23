"""Steps of a request while pages of others come from a storage, beside steps of an idle one.

    python benchmarks/beside.py --storage DIR --out benchmarks/results/beside.jsonl

Through ``model.generate``, batch 1: a prompt of ``--context`` tokens and ``--steps`` steps. In the
first half nothing else is done, and its second quarter counts; from the middle on pages of another
prompt of ``--context`` tokens are on their way from files to the host pool, again and again. A row
has the median and the 99th percentile of a step of either half, their ratios, and the bytes that
came meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import topkv
from topkv_bench.geometry import build, config_of


class Steps(BaseStreamer):
    """Records times of tokens; from step ``busy`` on fetches ``ids``, and forgets them again.

    Args:
        handle: handle of the attached model.
        ids: int64 ``[1, n]``, a prompt that a storage has.
        busy: the first step that is disturbed.
    """

    def __init__(self, handle: Any, ids: torch.Tensor, busy: int) -> None:
        self.handle, self.ids, self.busy = handle, ids, busy
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        found = self.handle.coordinator.keeper
        if len(self.times) >= self.busy and not found.poll():
            found.forget(stored=False)
            self.handle.prefixes.prefetch(self.ids)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def seconds(steps: Steps) -> tuple[list[float], list[float]]:
    """Times of steps that nothing disturbs, and of steps beside fetches."""
    gaps = [later - sooner for sooner, later in pairwise(steps.times)]
    half = steps.busy
    return gaps[half // 2 : half], gaps[half + 1 :]


def measure(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    room = -(-(options.context + options.steps) // 64) * 64
    below = {"path": str(options.storage / f"{time.time_ns()}"), "sync": False}
    config = {
        "algorithm": "quest", "backend": "triton_attention", "budget": options.budget,
        "max_requests": 1, "max_request_tokens": room, "max_tokens": 4 * room,
        "pages": {"name": "prefixes", "params": {"storage": {"name": "files", "params": below}}},
    }  # fmt: skip

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, model.config.vocab_size, (1, count), device=model.device)

    def generate(ids: torch.Tensor, steps: int, streamer: Any = None) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                       min_new_tokens=steps, max_new_tokens=steps, streamer=streamer)  # fmt: skip

    with topkv.attach(model, config) as handle:
        other = tokens(options.context)
        generate(other, 2)
        storage = handle.coordinator.keeper.storage
        storage.wait()
        generate(tokens(options.context), options.steps)  # kernels and graphs are there
        storage.wait()
        before = storage.counts.fetched_bytes
        steps = Steps(handle, other, options.steps // 2)
        generate(tokens(options.context), options.steps, steps)
        fetched = storage.counts.fetched_bytes - before
    idle, busy = seconds(steps)
    reported = {
        name: {
            "median_ms": 1e3 * statistics.median(each),
            "p99_ms": 1e3 * sorted(each)[int(0.99 * (len(each) - 1))],
        }
        for name, each in (("idle", idle), ("busy", busy))
    }
    return {
        **reported,
        "median_ratio": reported["busy"]["median_ms"] / reported["idle"]["median_ms"],
        "p99_ratio": reported["busy"]["p99_ms"] / reported["idle"]["p99_ms"],
        "fetched_bytes": fetched,
        "fetched_gbs": fetched / sum(busy) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a geometry of topkv bench")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--storage", type=Path, required=True, help="directory of topkv-files")
    parser.add_argument("--out", type=Path, help="append a JSON line here")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = build(
        config_of(options.model, None, options.context + options.steps + 64),
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if cuda else torch.float32,
    )
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    asked = {key: value for key, value in vars(options).items() if key not in ("storage", "out")}
    row = {"device": name, "torch": torch.__version__, **asked, **measure(model, options)}
    print(json.dumps(row), flush=True)
    if options.out:
        with options.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
