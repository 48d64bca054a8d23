"""How long a captured call takes: for benchmarks of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_us(*calls: Callable[[], object], repeats: int = 11) -> float:
    """Median time of one call, in microseconds, from replays of one graph that holds them all.

    Give calls on different inputs where the second call would find the first one's in cache, or
    one call several times.

    Args:
        calls: what to capture, in order; each runs three times before.
        repeats: replays.
    """
    for call in calls * 3:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(_replay_us(graph) for _ in range(repeats)) / len(calls)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
