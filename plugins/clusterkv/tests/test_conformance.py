"""ClusterKV against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def forced(length, bench):
    """Sinks and the open window, what came since the last settle; the newest K of them."""
    sinks = bench.params.sinks
    found = None
    for slot, keys in bench.keys.items():
        if len(keys) == length:
            closed = max(bench._settled[slot], sinks)
            now = {*range(min(sinks, length - 1)), *range(min(closed, length - 1), length - 1)}
            now = set(sorted(now)[-bench.case.select :])
            found = now if found is None else found & now
    return found or set()


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "tokens_per_cluster": st.integers(2, 3),
            "window": st.integers(4, 6),
            "segment": st.sampled_from([6, 16, 64]),
            "sinks": st.integers(0, 2),
            "iterations": st.just(3),
        }
    ),
    promised=forced,
    selects=(3, 8, 12),
    geometry={"units": (1,)},
    units=24,
)


class TestClusterKV(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "clusterkv"

    @pytest.fixture
    def options(self):
        return OPTIONS
