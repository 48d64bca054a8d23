"""Sinks, the order of channels and the size of a query, on the reference and on the kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.kit import examples

LABELS = ["bf16", "int4"]


def grid(generator, *shape):
    """Quarters up to 2: products and sums are exact in fp32."""
    return torch.randint(-8, 9, shape, generator=generator) / 4


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_sinks_are_forced_and_the_best_of_the_others_follow(bench, tier, label, scope):
    """All sinks that are asked for are forced, however bad; beside them float64 decides."""

    @examples(tier, cpu=20, interpret=3)
    @given(seed=st.integers(0, 999), sinks=st.integers(0, 5), length=st.integers(2, 40))
    def check(seed, sinks, length):
        b = bench(tier, label=label, scope=scope, seed=seed, sink_tokens=sinks, channels=6)
        q = b.case.queries(1)
        keys = torch.randn(length, 2, 16, generator=b.case.generator(1))
        keys[:6] -= 2 * q[0, 0, ::2]  # in the way of one query head of each kv-head at least
        b.prefill(0, keys)
        forced = set(range(min(sinks, length - 1)))
        weights = b.lane_weights(b.oracle(0, q[0]))
        for lane, chosen in enumerate(b.chosen(q[0])):
            assert forced <= chosen
            assert len(chosen) == min(b.group.select, length - 1)
            others = sorted(chosen - forced)
            left = sorted(set(range(length - 1)) - chosen)
            if others and left:
                best, worst = weights[lane, left].max(), weights[lane, others].min()
                assert worst >= best * (1 - 1e-4)

    check()


def test_the_order_of_channels_changes_no_selection(bench, tier, channel_file):
    """A label with its channels shuffled, and queries that are looked up alike."""
    order = [[(7 * c + h) % 16 for c in range(16)] for h in range(2)]
    path = channel_file({"0": channel_file.ranked(*order)})

    @examples(tier, cpu=20, interpret=3)
    @given(seed=st.integers(0, 999), scope=st.sampled_from(["kv_head", "shared"]))
    def check(seed, scope):
        chosen, generator = [], torch.Generator().manual_seed(seed)
        keys, q = grid(generator, 38, 2, 16), grid(generator, 1, 4, 16)
        shuffle = torch.randperm(7, generator=generator)
        for by in (torch.arange(7), shuffle):
            b = bench(tier, channels=7, scope=scope, calibration=path, seed=seed)
            fixed, ranges = b.algorithm.fixed
            b.algorithm.fixed = fixed[..., by.to(tier.device)].contiguous(), ranges
            b.prefill(0, keys[:30])
            b.extend(0, keys[30:])
            chosen.append(b.chosen(q))
            picked = torch.stack([keys[:, h, order[h][:7]] for h in range(2)], 1)
            stored = b.stored(0)["labels"]
            assert torch.equal(stored.sort(-1).values, picked.sort(-1).values)
        assert chosen[0] == chosen[1]

    check()


@pytest.mark.parametrize("label", LABELS)
def test_one_query_head_selects_by_direction_alone(bench, tier, label):
    """A lane of one query head has no softmax: q times c > 0 selects what q selects."""

    @examples(tier, cpu=20, interpret=3)
    @given(seed=st.integers(0, 999), exponent=st.sampled_from([-6, -1, 3, 9]))
    def check(seed, exponent):
        b = bench(tier, group=1, label=label, channels=6, seed=seed)
        b.prefill(0, torch.randn(40, 2, 16, generator=b.case.generator(1)))
        q = b.case.queries(1)[0]
        assert b.chosen(q) == b.chosen(q * 2.0**exponent)

    check()
