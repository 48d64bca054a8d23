"""The residual against the conformance kit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from topkv_residual.entry import topkv_register_stages
from topkv_testing.stages import StageOptions, StageTests

(ENTRY,) = topkv_register_stages()


def estimate(bench, slot, q):
    """Each unit by its mean key and value: ``log u + m + min(t / 2, sqrt(t (u - 1)))`` with the
    mean m and the variance t of its logits, channels taken as independent."""
    group, model = bench.group, bench.model
    params = bench.params
    closed, unit = bench.selectable(slot), group.unit
    keys = bench.keys[slot][: closed * unit].double().unflatten(0, (closed, unit))
    keys = keys.repeat_interleave(model.group_size, 2)
    queries = q[0].double() * model.scale
    weights = torch.einsum("hd,nhd->hn", queries, keys.mean(1)) + math.log(unit)
    if params.variance:
        spread = torch.einsum("hd,nhd->hn", queries**2, keys.var(1, correction=0))
        weights = weights + torch.minimum(spread / 2, (spread * (unit - 1)).sqrt())
    return weights, keys.flip(-1).mean(1).transpose(0, 1)


OPTIONS = StageOptions(
    params=st.fixed_dictionaries({"variance": st.sampled_from([True, False])}),
    selects=(2, 3, 5),
    estimate=estimate,
)


class TestResidual(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
