"""Units far below the best one rank by their scores."""

from __future__ import annotations

import math

import pytest
import torch

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import tier


@pytest.mark.parametrize("heads", [1, 2])
def test_a_decoy_does_not_hide_the_needle(heads):
    """A unit of a score far above all others takes one place, and the others rank as before."""
    case = Case(
        geometry=Geometry(1, heads, 64, 16, 16, "kv_head", torch.bfloat16),
        params={},
        select=3,
        ring=2,
        keys="normal",
        seed=0,
        least_units=18,
        stale=math.nan,
    )
    bench = AlgorithmBench(subject_of("arkvale", "algorithm", tier("cpu")), case)
    keys = torch.zeros(17 * 16, 1, 64)
    # Of channels in turns: the corner of unit 2 is worth 160, and each of its logits is 0.
    keys[32:48] = 5 * (1 - 2 * ((torch.arange(16)[:, None] + torch.arange(64)) % 2))[:, None]
    keys[15 * 16 : 16 * 16] = 0.9375  # of logit 30: this unit has all of the attention mass
    bench.prefill(0, keys.bfloat16())
    q = torch.full((1, 1, heads, 64), 0.5 / bench.model.scale)
    assert bench.retrieve(q.bfloat16(), [0]).tolist() == [[[0, 2, 15]]]
