"""Quest against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def sinks(length, bench):
    """The first ``sink_units`` of the closed units."""
    return set(range(min(bench.params.sink_units, (length - 1) // bench.group.unit)))


def not_below(x):
    """The smallest bfloat16 numbers that are not below float64 ``x``, as float64."""
    near = x.bfloat16()
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.double() < x, above, near).double()


def bounds(keys, metadata):
    """float64 ``[units, Hkv, D]``, twice: what is kept of keys ``[units, unit, Hkv, D]``."""
    low, high = keys.double().amin(1), keys.double().amax(1)
    if metadata == "int8":
        largest = torch.maximum(low.abs(), high.abs()).amax(-1, keepdim=True)
        step = not_below(largest / 127)
        safe = torch.where(step > 0, step, 1.0)
        return (low / safe).floor() * step, (high / safe).ceil() * step
    return (low, high) if keys.dtype.itemsize == 2 else (-not_below(-low), not_below(high))


def oracle(bench, slot, q):
    """The paper's bound of each unit, softmaxed, the mean over the query heads of a lane."""
    group, model = bench.group, bench.model
    closed = bench.selectable(slot)
    keys = bench.keys[slot][: closed * group.unit].unflatten(0, (closed, group.unit))
    params = bench.params
    low, high = bounds(keys, params.metadata)
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    products = (x[:, :, None] * heads for x in (low, high))
    scores = torch.maximum(*products).sum(-1) * model.scale
    weights = scores.softmax(0).flatten(1, 2).unflatten(1, (group.lane_heads, -1))
    return weights.mean(-1).T


OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {"metadata": st.sampled_from(["bf16", "int8"]), "sink_units": st.integers(0, 2)}
    ),
    promised=sinks,
    selects=(2, 3, 5),
    hidden_needles=True,
    head_needles=True,
    oracle=oracle,
)


class TestQuest(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "quest"

    @pytest.fixture
    def options(self):
        return OPTIONS
