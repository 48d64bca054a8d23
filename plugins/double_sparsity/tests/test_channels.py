"""Choice of channels, and its statistics in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_double_sparsity import reference
from topkv_double_sparsity.calibration import PROMPT_STATISTICS
from topkv_double_sparsity.statistics import Moments, of_prompt, of_weight


def expected(q, k, statistic):
    """The statistic by its definition, numpy, ``[Hkv, D]``."""
    k = np.asarray(k.double())
    q = np.asarray(q.double()).reshape(len(q), k.shape[1], -1, k.shape[2])
    variance = ((k - k.mean(0)) ** 2).mean(0)
    return {
        "qk_span": np.abs(q).mean(0).sum(1) * (k.max(0) - k.min(0)),
        "k": np.abs(k).mean(0),
        "qk": np.abs(q * k[:, :, None]).mean(0).sum(1),
        "q": np.abs(q).mean(0).sum(1),
        "k_var": variance,
    }[statistic]


@given(
    seed=st.integers(0, 999),
    cuts=st.lists(st.integers(1, 59), max_size=4, unique=True),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_every_statistic_counts_every_block(seed, cuts, offset):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(60, 6, 8, generator=generator), torch.randn(60, 2, 8, generator=generator)
    k = k.double() + offset
    moments = Moments(2, 8)
    edges = [0, *sorted(cuts), 60]
    for start, end in pairwise(edges):
        moments.add(q[start:end], k[start:end])
    for statistic in PROMPT_STATISTICS:
        truth = expected(q, k, statistic)
        assert np.allclose(np.asarray(moments.importance(statistic)), truth, rtol=1e-10, atol=0)


def test_statistics_are_refused_without_tokens_and_by_wrong_names():
    with pytest.raises(ValueError, match="no tokens"):
        Moments(1, 2).importance("qk")
    with pytest.raises(ValueError, match="expected one of"):
        Moments(1, 2).importance("k_weight")
    with pytest.raises(ValueError, match="same tokens"):
        Moments(1, 2).add(torch.zeros(3, 1, 2), torch.zeros(2, 1, 2))


def test_the_norm_of_weights():
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    truth = np.sqrt((np.asarray(weight.double()) ** 2).sum(1)).reshape(2, 3)
    assert np.allclose(np.asarray(of_weight(weight, 2)), truth, rtol=1e-12)


@given(rows=st.lists(st.lists(st.integers(0, 5), min_size=8, max_size=8), min_size=1, max_size=3))
def test_channels_are_the_first_of_a_permutation(rows):
    importance = torch.tensor(rows, dtype=torch.float64)
    order = reference.ranked(importance).tolist()
    for row, values in zip(order, rows, strict=True):
        assert row == sorted(range(8), key=lambda c: (-values[c], c))
    for count in range(1, 9):
        assert reference.choose(importance, count, False).tolist() == [
            sorted(row[:count]) for row in order
        ]


@given(rows=st.lists(st.lists(st.integers(0, 5), min_size=8, max_size=8), min_size=1, max_size=3))
def test_pairs_are_taken_together(rows):
    importance = torch.tensor(rows, dtype=torch.float64)
    for count in (2, 4, 8):
        for row, values in zip(
            reference.choose(importance, count, True).tolist(), rows, strict=True
        ):
            worth = [values[c] + values[c + 4] for c in range(4)]
            low = sorted(sorted(range(4), key=lambda c: (-worth[c], c))[: count // 2])
            assert row == [*low, *(c + 4 for c in low)]


def test_order_of_channels_does_not_matter_to_a_score():
    generator = torch.Generator().manual_seed(0)
    keys, q = (
        torch.randint(-8, 9, shape, generator=generator) / 4 for shape in ((20, 2, 16), (1, 4, 16))
    )
    channels = torch.stack([torch.randperm(16, generator=generator)[:7] for _ in range(2)])
    shuffled = channels[:, torch.randperm(7, generator=generator)]
    first, second = (
        reference.head_logits(q, c[None], reference.gather(keys, c[None])[None])
        for c in (channels, shuffled)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("statistic", PROMPT_STATISTICS)
def test_the_first_chunk_of_a_prompt_chooses(bench, tier, statistic):
    b = bench(tier, channels=6, statistic=statistic)
    assert b.spec.prefix == "none"
    scales = 2.0 ** torch.randint(-3, 4, (2, 16), generator=b.case.generator(3))
    keys = torch.randn(30, 2, 16, generator=b.case.generator(1)) * scales
    b.prefill(1, keys, cuts=(12, 20))
    truth = expected(b._prompt[:12], keys[:12], statistic)
    wanted = [sorted(np.argsort(-row, kind="stable")[:6].tolist()) for row in truth]
    assert b.chosen_channels(1).tolist() == wanted
    b.extend(1, keys[:3] * 100)
    assert b.chosen_channels(1).tolist() == wanted


def test_a_first_chunk_of_one_token_takes_its_largest_channels(bench, tier):
    b = bench(tier, channels=3, statistic="k_var")
    keys = torch.randn(10, 2, 16, generator=b.case.generator(1))
    b.prefill(0, keys, cuts=(1,))
    wanted = [row.abs().topk(3).indices.sort().values.tolist() for row in keys[0]]
    assert b.chosen_channels(0).tolist() == wanted


def test_the_size_of_blocks_of_a_prompt_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(50, 4, 8, generator=generator), torch.randn(50, 2, 8, generator=generator)
    one, many = (of_prompt(q, k, "k_var", block) for block in (64, 7))
    assert torch.allclose(one, many, rtol=1e-12, atol=0)
