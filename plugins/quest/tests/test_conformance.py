"""Quest against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv.testing.algorithms import AlgorithmOptions, AlgorithmTests


def sinks(length, bench):
    """The first ``sink_units`` of the closed units."""
    params = {**bench.subject.entry.parameters, **bench.case.params}
    return set(range(min(params["sink_units"], (length - 1) // bench.group.unit)))


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {"metadata": st.sampled_from(["bf16", "int8"]), "sink_units": st.integers(0, 2)}
    ),
    promised=sinks,
    selects=(2, 3, 5),
    hidden_needles=True,
    head_needles=True,
)


class TestQuest(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "quest"

    @pytest.fixture
    def options(self):
        return OPTIONS
