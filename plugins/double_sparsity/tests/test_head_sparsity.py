"""Flat lanes get a smaller budget, where head sparsity is on."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv.testing.kit import examples
from topkv_double_sparsity import reference
from topkv_double_sparsity.algorithm import DoubleSparsity


def peaked(b, q, slot=0):
    """float64 normalised entropy of each lane over the sample, mean over its query heads."""
    logits = b.oracle(slot, q)
    logits = logits[:, b.sample_of(logits.shape[1])]
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return (
        entropy.unflatten(0, (b.group.lane_heads, -1)).mean(1)
        / torch.tensor(float(logits.shape[1])).log()
    )


def test_it_is_off_by_default(bench, tier):
    b = bench(tier, select=8)
    assert type(b.algorithm) is DoubleSparsity
    b.prefill(0, b.case.tokens(0))
    assert [len(lane) for lane in b.chosen(b.case.queries(1)[0] * 0)] == [8, 8]


def test_flat_lanes_select_their_share(bench, tier, monkeypatch):
    @examples(tier, cpu=15, interpret=5)
    @given(
        seed=st.integers(0, 999),
        most=st.sampled_from([4096, 16]),
        label=st.sampled_from(["bf16", "int4"]),
        scope=st.sampled_from(["kv_head", "shared"]),
        above=st.booleans(),
    )
    def check(seed, most, label, scope, above):
        monkeypatch.setattr(reference, "SAMPLE", most)
        shape = {"label": label, "scope": scope, "seed": seed, "select": 8, "channels": 6}
        plain = bench(tier, **shape)
        keys = torch.randn(37, 2, 16, generator=plain.case.generator(1))
        q = plain.case.queries(1)[0] * torch.tensor([0.5, 0.5, 4, 4])[:, None]
        plain.prefill(0, keys)
        flatness = peaked(plain, q)
        # A threshold between the lanes, or on one side of all of them.
        threshold = float(flatness.mean() if len(flatness) > 1 else flatness[0] * 0.99)
        threshold = min(threshold * 1.02 if above else threshold, 1.0)
        b = bench(tier, **shape, head_sparsity=threshold, head_budget=0.3)
        b.prefill(0, keys)
        few = bench(tier, **{**shape, "select": 3})
        few.prefill(0, keys)
        wide, narrow = plain.chosen(q), few.chosen(q)
        for lane, chosen in enumerate(b.chosen(q)):
            if abs(float(flatness[lane]) - threshold) > 1e-4:
                flat = flatness[lane] > threshold
                assert chosen == (narrow if flat else wide)[lane]

    check()


def test_lanes_of_one_batch_are_judged_alone(bench, tier):
    shape = {"group": 1, "select": 8, "channels": 16, "requests": 3}
    b = bench(tier, **shape, head_sparsity=0.9, head_budget=0.5)
    for slot, length in enumerate((40, 6)):
        b.prefill(slot, torch.randn(length, 2, 16, generator=b.case.generator(slot)))
    q = torch.zeros(3, 1, 2, 16)
    q[0, 0, 1] = b.keys[0][20, 1] * 20
    ids = b.retrieve(q, [0, -1, 1]).tolist()
    assert ids[0][0] == [0, 1, 2, 3, -1, -1, -1, -1], "uniform: half of K, lowest first"
    assert len(set(ids[0][1]) - {-1}) == 8, "one peak: all of K"
    assert 20 in ids[0][1]
    assert ids[1] == [[-1] * 8] * 2
    assert ids[2] == [[0, 1, 2, 3, 4, -1, -1, -1]] * 2, "K covers it: everything"


def test_sinks_are_forced_in_flat_lanes_too(bench, tier):
    b = bench(tier, select=8, sink_tokens=3, head_sparsity=0.01, head_budget=0.1)
    b.prefill(0, torch.randn(40, 2, 16, generator=b.case.generator(1)))
    assert b.chosen(b.case.queries(1)[0]) == [{0, 1, 2}] * 2
