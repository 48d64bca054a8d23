"""topkv-minimal against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def sinks(length, bench):
    """The first ``sink_units`` of the closed units: what every selection holds."""
    return set(range(min(bench.params.sink_units, (length - 1) // bench.group.unit)))


class TestMinimalAlgorithm(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "minimal"

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(
            params=st.fixed_dictionaries({"sink_units": st.integers(0, 2)}),
            promised=sinks,
            selects=(2, 3, 5),
            head_needles=True,
        )
