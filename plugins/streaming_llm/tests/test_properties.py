"""A selection is a function of the length alone, and costs no memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import examples, subject_of
from topkv_testing.tiers import all_tiers

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"sink_tokens": st.integers(0, 5)}), selects=(5, 6, 8)
)


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
    ]
)
def subject(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return subject_of("streaming_llm", "algorithm", request.param, OPTIONS)


def slice_of(length, unit, select, sinks):
    """First and newest closed units, ascending, -1 behind them."""
    closed = list(range((length - 1) // unit))
    first = -(-sinks // unit)
    if len(closed) > select:
        closed = closed[:first] + closed[len(closed) - (select - first) :]
    return closed + [-1] * (select - len(closed))


def test_queries_keys_and_heads_do_not_matter(subject):
    """NaN for all of them: every lane has the exact slice, in order, in every step."""

    @examples(subject.tier, cpu=60, interpret=5)
    @given(case=cases(subject), data=st.data())
    def check(case, data):
        bench = AlgorithmBench(subject, case, values=torch.nan)
        keys = torch.full_like(case.tokens(0), torch.nan)
        nan = torch.full_like(case.queries(3), torch.nan)
        bench.prefill(2, keys[: data.draw(bench.lengths(most=case.most - 6))])
        bench.prefill(0, keys[: data.draw(bench.lengths(most=case.most - 6))])
        for _ in range(5):
            bench.append([0, -1, 2], keys[:3])
            ids = bench.retrieve(nan, [0, -1, 2]).tolist()
            shape = (case.geometry.unit, case.select, case.params["sink_tokens"])
            expected = [
                slice_of(len(bench.keys[0]), *shape),
                [-1] * case.select,
                slice_of(len(bench.keys[2]), *shape),
            ]
            assert ids == [[row] * case.geometry.lane_heads for row in expected]

    check()


def test_there_are_no_representations(subject):
    """0 bytes per token and per request, as the README says."""

    @examples(subject.tier, cpu=10, interpret=2)
    @given(case=cases(subject))
    def check(case):
        bench = AlgorithmBench(subject, case)
        assert bench.spec.representations == ()
        assert sum(pool.nbytes for pool in bench.pools.values()) == 0
        assert bench.spec.settle_period is None

    check()
