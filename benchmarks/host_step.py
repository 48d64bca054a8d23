"""Host time of a captured decode step: ``forward_begin`` and ``forward_end`` together.

    python benchmarks/host_step.py --out benchmarks/results/host_step.jsonl

Four layers on the GPU, of which Quest leaves two dense, as in a model; narrow ones, for their
width makes no difference to the host. Requests of 120,000 tokens, whose pools are allotted and not
filled, for nothing here reads them. Wall-clock time in microseconds, median and 90 % of all steps;
the GPU is idle, so waiting for it is no part of a step. Other work on a host comes in bursts, so
the sizes take turns, and ``turns_us`` is the least and the largest median of a turn.
``--device cpu`` compares two checkouts on a quieter host, where copies are cheaper than a GPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import chain
from pathlib import Path

import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape

TOKENS, STEPS, WARM, TURNS = 120_000, 100, 20, 20
MODEL = ModelShape(4, 8, 2, 64, torch.bfloat16, 64**-0.5)


def make(rows: int, device: torch.device) -> tuple[SparseCoordinator, list[int]]:
    """Make a coordinator; return it with the slots of its requests."""
    tokens = TOKENS + TURNS * (WARM + STEPS) + 64
    config = SparseConfig(
        algorithm="quest",
        backend="triton_attention",
        impl="reference" if device.type == "cpu" else "triton",
        max_requests=rows,
        max_tokens=rows * tokens,
        max_request_tokens=tokens,
    )
    lowered = lower(config, MODEL, device=device, registry=registry())
    coordinator = SparseCoordinator(lowered)
    slots = []
    for _ in range(rows):
        slots.append(coordinator.request_begin())
        coordinator.forward_begin(prefill=[(slots[-1], TOKENS)])
        coordinator.forward.attended.update(range(MODEL.num_layers))  # nothing of it is read here
        coordinator.forward_end(offloaded=True)
    return coordinator, slots


def turn(coordinator: SparseCoordinator, slots: list[int]) -> list[float]:
    """Run steps; return the microseconds of each on the host."""
    times = []
    for _ in range(WARM + STEPS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        coordinator.forward_begin(decode=slots)
        coordinator.forward_end(offloaded=True)
        times.append((time.perf_counter() - started) * 1e6)
    return times[WARM:]


def summary(rows: int, turns: list[list[float]]) -> dict[str, object]:
    medians, steps = sorted(map(statistics.median, turns)), sorted(chain(*turns))
    return {
        "what": "forward_begin and forward_end",
        "rows": rows,
        "median_us": round(statistics.median(steps), 1),
        "p90_us": round(steps[int(0.9 * len(steps))], 1),
        "turns_us": [round(medians[0], 1), round(medians[-1], 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--device", type=torch.device, default="cuda:0")
    options = parser.parse_args()
    made = {rows: make(rows, options.device) for rows in options.rows}
    turns: dict[int, list[list[float]]] = {rows: [] for rows in options.rows}
    for _ in range(TURNS):
        for rows in options.rows:
            turns[rows].append(turn(*made[rows]))
    results = [summary(rows, turns[rows]) for rows in options.rows]
    for result in results:
        print(result, flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
