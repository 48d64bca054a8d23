"""SnapKV against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.kit import examples


def window(length, bench):
    """The last tokens of a prompt, less the newest, which the core appends."""
    return set(range(max(length - bench.params.window, 0), length - 1))


PARAMS = {
    "window": st.sampled_from([1, 3, 4]),
    "kernel": st.sampled_from([1, 3]),
    "generated": st.integers(3, 4),
    "outgrow": st.sampled_from(["refuse", "slide"]),
}

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(PARAMS), promised=window, selects=(9, 11, 14, 31), units=32
)


class TestSnapKV(AlgorithmTests):
    """The kit, where what a request keeps follows from the end of its prompt."""

    @pytest.fixture
    def plugin(self):
        return "snapkv"

    @pytest.fixture
    def options(self):
        return OPTIONS

    def test_a_prompt_over_pages_of_another_computes_its_tail_alone(self, subject):
        """The prompt keeps the tokens that it would keep if it had computed all of them."""

        @examples(subject.tier, cpu=60, interpret=5, gpu=20)
        @given(case=cases(subject), data=st.data())
        def check(case, data):
            alone, over = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
            keys = case.tokens(0)[: data.draw(alone.long_lengths() | alone.lengths(least=2))]
            most = max(len(keys) - alone.spec.prompt_tail, 0)
            shared = data.draw(st.just(most) | st.integers(0, most))
            alone.prefill(0, keys)
            over._hold(0, keys[:shared])
            over.prefill(0, keys[shared:])
            for name in ("kept", "count"):
                assert torch.equal(over.pools[name], alone.pools[name]), name

        check()
