"""ArkVale against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def sinks(length, bench):
    """The first ``sink_units`` of the closed units."""
    return set(range(min(bench.params.sink_units, (length - 1) // bench.group.unit)))


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"sink_units": st.integers(0, 2)}),
    promised=sinks,
    selects=(2, 3, 5),
    # No hidden_needles: the mean pulls the box away from a single key, see the README.
    head_needles=True,
)


class TestArkVale(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "arkvale"

    @pytest.fixture
    def options(self):
        return OPTIONS
