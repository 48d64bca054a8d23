"""InfLLM-v2 against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests

pytestmark = pytest.mark.slow


def forced(length, bench):
    """The first ``sink_units`` and the last ``recent_units`` of the closed units."""
    algorithm = bench.algorithm
    units = range((length - 1) // bench.group.unit)
    recent = units[max(0, len(units) - algorithm.recent_units) :]
    return {*units[: algorithm.sink_units], *recent}


def oracle(bench, slot, q):
    """The largest mean of softmaxed windows, each of them by itself, with means rounded as kept.

    A window is two whole parts, or the last whole part alone.
    """
    group, model, stride = bench.group, bench.model, bench.algorithm.stride
    keys = bench.keys[slot]
    whole = (len(keys) - 1) // stride
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    logits = []
    for first in range(whole):
        parts = [
            keys[part * stride : (part + 1) * stride].double().mean(0).to(model.dtype).double()
            for part in range(first, min(first + 2, whole))
        ]
        logits.append(torch.einsum("hgd,hd->hg", heads, sum(parts) / len(parts)) * model.scale)
    weights = torch.stack(logits).softmax(0).flatten(1).unflatten(1, (group.lane_heads, -1))
    shares = weights.mean(-1)  # [windows, lanes]
    per, units = group.unit // stride, (len(keys) - 1) // group.unit
    best = [shares[max(0, unit * per - 1) : unit * per + per].amax(0) for unit in range(units)]
    return torch.stack(best, 1)


class TestInfLLMv2(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "infllm_v2"

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(
            params=st.fixed_dictionaries(
                {
                    "stride": st.sampled_from([1, 2, 4]),
                    "sink_units": st.integers(0, 1),
                    "recent_units": st.integers(0, 1),
                }
            ),
            promised=forced,
            geometry={"units": (4, 8)},
            selects=(2, 3, 5),
            oracle=oracle,
        )
