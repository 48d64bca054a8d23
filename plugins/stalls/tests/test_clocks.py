"""The clock of devices against that of the host, over any misses of any number of lanes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from topkv_stalls.clocks import DeviceClock, HostClock
from topkv_testing.tiers import tier


@triton.jit
def given_ns(p_now):
    """Stands in for the clock of a device: its time is stored behind those of the layer."""
    return tl.load(p_now + 2)


def test_the_kernels_add_what_the_host_adds(monkeypatch):
    """The clock of both is set by hand."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    few = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    hits = st.sampled_from([0, 1, 254, 255, 256, 300, 520]).map(lambda count: [0] * count)
    lanes = st.builds(lambda before, missed, after: before + missed + after, hits, few, hits)
    looks = st.tuples(lanes, st.integers(0, 2**60), st.integers(0, 2**40))

    @given(st.lists(looks, max_size=4))
    def run(program):
        times, expected = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        kernels, host = DeviceClock(now=given_ns), HostClock()
        for lanes, began, took in program:
            misses = torch.tensor(lanes, dtype=torch.int32)
            for look, now in (("begin", began), ("end", began + took)):
                times[2] = now
                monkeypatch.setattr("topkv_stalls.clocks.perf_counter_ns", lambda now=now: now)
                rest = () if look == "begin" else (misses,)
                getattr(kernels, look)(times, *rest)
                getattr(host, look)(expected, *rest)
        assert torch.equal(times[:2], expected)

    run()
