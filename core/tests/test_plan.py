"""Hit rate of a trace: the figure behind the default proportions of buffer and selection."""

from __future__ import annotations

from functools import partial

import torch

from topkv.plugins import registry
from topkv_testing.strategies import selections
from topkv_testing.transfer.bench import Row, TransferBench, group_shape


def test_a_trace_of_85_percent_overlap_hits_at_least_80_percent():
    """Default proportions: the buffer is twice the selection. The figure is that of the seed."""
    width, universe = 127, 2048
    group = group_shape(
        select=width,
        slots=256,
        lane_heads=1,
        unit=1,
        units=universe,
        requests=1,
        layers=1,
    )
    make = partial(registry().create, "transfer", "zero_copy")
    bench = TransferBench(make, group, torch.device("cpu"), "reference")
    stream = selections(universe - 4, width, 0.85, "jumping", seed=1)
    for _ in range(100):
        bench.put([Row(0, universe, universe)])
        bench.run(0, [next(stream)])
    hits, misses = bench.store.counters[0, 0].tolist()
    assert hits / (hits + misses) >= 0.80
