"""Choice of channels, and its statistics in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_double_sparsity import reference
from topkv_double_sparsity.statistics import Moments, of_prompt


def expected(q, k):
    """E|q| (max k - min k), numpy, ``[Hkv, D]``."""
    k = np.asarray(k.double())
    q = np.asarray(q.double()).reshape(len(q), k.shape[1], -1, k.shape[2])
    return np.abs(q).mean(0).sum(1) * (k.max(0) - k.min(0))


@given(
    seed=st.integers(0, 999),
    cuts=st.lists(st.integers(1, 59), max_size=4, unique=True),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_every_block_counts(seed, cuts, offset):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(60, 6, 8, generator=generator), torch.randn(60, 2, 8, generator=generator)
    k = k.double() + offset
    moments = Moments(2, 8)
    edges = [0, *sorted(cuts), 60]
    for start, end in pairwise(edges):
        moments.add(q[start:end], k[start:end])
    assert np.allclose(np.asarray(moments.importance()), expected(q, k), rtol=1e-10, atol=0)


def test_importance_is_refused_without_tokens_and_of_others():
    with pytest.raises(ValueError, match="no tokens"):
        Moments(1, 2).importance()
    with pytest.raises(ValueError, match="same tokens"):
        Moments(1, 2).add(torch.zeros(3, 1, 2), torch.zeros(2, 1, 2))


@given(rows=st.lists(st.lists(st.integers(0, 5), min_size=8, max_size=8), min_size=1, max_size=3))
def test_channels_are_the_first_of_a_permutation(rows):
    importance = torch.tensor(rows, dtype=torch.float64)
    order = [sorted(range(8), key=lambda c, row=row: (-row[c], c)) for row in rows]
    for count in range(1, 9):
        assert reference.choose(importance, count).tolist() == [
            sorted(row[:count]) for row in order
        ]


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


def test_the_first_chunk_of_a_prompt_chooses(bench, tier):
    b = bench(tier, channels=6)
    assert b.spec.prefix == "none"
    scales = 2.0 ** torch.randint(-3, 4, (2, 16), generator=b.case.generator(3))
    keys = torch.randn(30, 2, 16, generator=b.case.generator(1)) * scales
    b.prefill(1, keys, cuts=(12, 20))
    truth = expected(b._prompt[:12], keys[:12])
    wanted = [sorted(np.argsort(-row, kind="stable")[:6].tolist()) for row in truth]
    assert b.chosen_channels(1).tolist() == wanted
    b.extend(1, keys[:3] * 100)
    assert b.chosen_channels(1).tolist() == wanted


def test_a_first_chunk_of_one_token_takes_its_largest_channels(bench, tier):
    b = bench(tier, channels=3)
    keys = torch.randn(10, 2, 16, generator=b.case.generator(1))
    b.prefill(0, keys, cuts=(1,))
    worth = b._prompt[0].double().abs().unflatten(0, (2, -1)).sum(1) * keys[0].double().abs()
    wanted = [row.topk(3).indices.sort().values.tolist() for row in worth]
    assert b.chosen_channels(0).tolist() == wanted


def test_the_size_of_blocks_of_a_prompt_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(50, 4, 8, generator=generator), torch.randn(50, 2, 8, generator=generator)
    one, many = (of_prompt(q, k, block) for block in (64, 7))
    assert torch.allclose(one, many, rtol=1e-12, atol=0)
