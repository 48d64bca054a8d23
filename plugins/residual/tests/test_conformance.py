"""The residual against the conformance kit."""

from __future__ import annotations

import math

import pytest
import torch

from topkv_residual.entry import topkv_register_stages
from topkv_testing.stages import StageOptions, StageTests

(ENTRY,) = topkv_register_stages()


def estimate(bench, slot, q):
    """Each unit by its mean key and value: ``log u`` and the mean of its logits."""
    group, model = bench.group, bench.model
    closed, unit = bench.selectable(slot), group.unit
    keys = bench.keys[slot][: closed * unit].double().unflatten(0, (closed, unit))
    keys = keys.repeat_interleave(model.group_size, 2)
    queries = q[0].double() * model.scale
    weights = torch.einsum("hd,nhd->hn", queries, keys.mean(1)) + math.log(unit)
    return weights, keys.flip(-1).mean(1).transpose(0, 1)


OPTIONS = StageOptions(selects=(2, 3, 5), estimate=estimate)


class TestResidual(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
