"""StreamingLLM against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def kept(length, bench):
    """The exact slice, in plain Python."""
    params = bench.params
    unit, select = bench.group.unit, bench.group.select
    closed = list(range((length - 1) // unit))
    if len(closed) <= select:
        return set(closed)
    sinks = -(-params.sink_tokens // unit)
    return {*closed[:sinks], *closed[len(closed) - select + sinks :]}


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"sink_tokens": st.integers(0, 2)}),
    promised=kept,
    selects=(2, 3, 5),
)


class TestStreamingLLM(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "streaming_llm"

    @pytest.fixture
    def options(self):
        return OPTIONS
