"""The reference transfer does not loop over tokens: 40 take few operations more than one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from topkv.plugins import registry
from topkv_testing.transfer.bench import Row, TransferBench, group_shape


class Counting(TorchDispatchMode):
    """Counts the operations of torch that run within it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def bench_of(**shape):
    make = partial(registry().create, "transfer", "zero_copy")
    group = group_shape(units=256, requests=1, layers=1, **shape)
    return TransferBench(make, group, torch.device("cpu"), "reference")


@pytest.mark.parametrize("host_format", ["model", "fp8"])
@pytest.mark.parametrize("unit", [1, 4])
def test_a_chunk_is_stored_in_few_operations(unit, host_format):
    counts = []
    for tokens in (unit, 40 * unit):
        bench = bench_of(unit=unit, slots=64, host_format=host_format)
        k, v = torch.randn(2, tokens, 2, 4)
        with Counting() as counting:
            bench.engine.store_chunk(bench.views[0], 0, 0, k, v, tokens, True)
        counts.append(counting.count)
    few, many = counts
    assert many < 1.5 * few


def test_a_step_is_planned_and_loaded_in_few_operations():
    counts = []
    for select in (1, 40):
        bench = bench_of(unit=1, select=select, slots=64)
        bench.put([Row(0, 250, 250)])
        ids = [list(range(0, 4 * select, 4))] * 2
        selection = torch.tensor(ids, dtype=torch.int32)
        with Counting() as counting:
            bench.engine.plan(bench.views[0], selection, bench.limit, bench.plan)
            bench.engine.load(bench.views[0], bench.plan)
        assert bench.plan.misses.tolist() == [select] * 2
        counts.append(counting.count)
    few, many = counts
    assert many < 1.5 * few
