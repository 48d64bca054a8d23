"""Digest and score against the paper's formulas in float64, one unit and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_arkvale.algorithm import digest_of, head_scores


def digest_in_float64(keys):
    """Centre and radius ``[2, D]`` of keys ``[n, D]``, as the formulas read."""
    keys = keys.double()
    centre = (keys.amin(0) + keys.amax(0)) / 2
    return torch.stack([centre, torch.stack([(centre - key).abs() for key in keys]).mean(0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_digest_is_that_of_the_valid_keys(dtype):
    @given(seed=st.integers(0, 99), tokens=st.integers(1, 9))
    def check(seed, tokens):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(1, 9, 2, 5, generator=generator).to(dtype)
        valid = torch.arange(9) < tokens
        expected = torch.stack([digest_in_float64(keys[0, :tokens, head]) for head in range(2)])
        keys[0, tokens:] = math.nan
        got = digest_of(keys, valid[None])[0].double()
        torch.testing.assert_close(got, expected, rtol=2**-22, atol=2**-22)

    check()


def test_score_is_that_of_the_best_corner():
    @given(seed=st.integers(0, 99), group=st.sampled_from([1, 2, 4]))
    def check(seed, group):
        generator = torch.Generator().manual_seed(seed)
        digest = torch.randn(2, 3, 2, 2, 5, generator=generator)
        digest[:, :, :, 1] = digest[:, :, :, 1].abs()
        q = torch.randn(2, 2 * group, 5, generator=generator)
        scores = head_scores(q, digest)
        assert scores.shape == (2, 2 * group, 3)
        for row in range(2):
            for head in range(2 * group):
                for unit in range(3):
                    centre, radius = digest[row, unit, head // group].double()
                    x = q[row, head].double()
                    best = torch.maximum(x * (centre - radius), x * (centre + radius)).sum()
                    assert abs(scores[row, head, unit].item() - best.item()) < 1e-5

    check()


def test_it_never_exceeds_the_bound_of_quest():
    """The radius is at most half of the box's width, so the score is at most that of the box."""

    @given(seed=st.integers(0, 99))
    def check(seed):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(4, 6, 1, 5, generator=generator)
        q = torch.randn(1, 2, 5, generator=generator)
        low, high = keys.amin(1), keys.amax(1)  # [4, 1, 5]
        bound = torch.maximum(q[0] * low, q[0] * high).sum(-1).T
        digest = digest_of(keys, torch.ones(4, 6, dtype=torch.bool))
        assert (head_scores(q, digest[None])[0] <= bound + 1e-5).all()

    check()
