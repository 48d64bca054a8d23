"""The time of a captured call, for benchmarks of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(
    *calls: Callable[[], object], repeats: int = 11, first: Callable[[], object] | None = None
) -> float:
    """Median time of one call, in microseconds, from replays of one graph that holds them all.

    Give calls on different inputs where the second call would find the first one's in cache, or
    one call several times.

    Args:
        calls: what to capture, in order; each runs three times before.
        repeats: replays.
        first: what to capture before them. Its time does not count: the mean of as many of it as
            there are calls is taken off.
    """
    graph = _captured([first, *calls] if first else calls)
    total = statistics.median(_replay_us(graph) for _ in range(repeats))
    if first:
        total -= graph_us(*[first] * len(calls), repeats=repeats)
    return total / len(calls)


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        for call in calls:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
