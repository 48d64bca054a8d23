"""The block index against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def promised(length, bench):
    """The last closed units that the model always attends to."""
    closed = (length - 1) // bench.group.unit
    return {*range(max(0, closed - bench.algorithm.local + 1), closed)}


def oracle(bench, slot, q):
    """The best product of the tokens of each unit, in float64."""
    unit, keys = bench.group.unit, bench.keys[slot][:, 0].double()
    closed = (len(keys) - 1) // unit
    products = torch.einsum("hd,nd->hn", q[0].double(), keys[: closed * unit])
    return products.unflatten(1, (closed, unit)).amax(2)


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"local": st.sampled_from([1, 2])}),
    promised=promised,
    hidden_needles=True,
    oracle=oracle,
)


class TestTrainedGate(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "trained_gate"

    @pytest.fixture
    def options(self):
        return OPTIONS
