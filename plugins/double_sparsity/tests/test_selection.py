"""Selected tokens against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_double_sparsity import launch, reference
from topkv_testing.kit import examples


def grid(generator, *shape):
    """Quarters up to 2: products and sums are exact in fp32, and softmax never underflows."""
    return torch.randint(-8, 9, shape, generator=generator) / 4


def best(scores, count):
    """The ``count`` best of a list, of equal ones the lower."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_channels_are_exact_top_k_by_q_times_k(bench, tier, dtype):
    @examples(tier, cpu=20, interpret=4)
    @given(seed=st.integers(0, 999), length=st.integers(2, 40), select=st.sampled_from([1, 4, 9]))
    def check(seed, length, select):
        b = bench(tier, group=1, channels=16, dtype=dtype, select=select)
        generator = torch.Generator().manual_seed(seed)
        keys, q = grid(generator, length, 2, 16), grid(generator, 1, 2, 16)
        b.prefill(0, keys.to(dtype))
        for head, chosen in enumerate(b.chosen(q.to(dtype))):
            scores = (keys[: length - 1, head].double() @ q[0, head].double()).tolist()
            assert chosen == best(scores, select)

    check()


@pytest.mark.parametrize("label", ["bf16", "int4"])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "channels"),
    [
        (torch.float32, 2, 2, 5),
        (torch.bfloat16, 4, 4, 8),
        (torch.float16, 3, 1, 16),
        (torch.bfloat16, 1, 20, 3),
    ],
)
def test_selection_agrees_with_float64(bench, tier, label, dtype, kv_heads, group, channels):
    shape = {"kv_heads": kv_heads, "group": group, "channels": channels, "dtype": dtype}

    @examples(tier, cpu=12, interpret=3)
    @given(
        seed=st.integers(0, 999),
        scope=st.sampled_from(["kv_head", "shared"]),
        spread=st.sampled_from([20.0, 1.0]),
    )
    def check(seed, scope, spread):
        b = bench(tier, label=label, scope=scope, seed=seed, **shape)
        keys = torch.randn(39, kv_heads, 16, generator=b.case.generator(1))
        keys[..., seed % 16] *= spread
        b.prefill(1, keys.to(dtype))
        q = b.case.queries(1)
        assert_best(b, q, 1)

    check()


def assert_best(b, q, slot):
    """No token that was left out is worth more than one that was selected, but for rounding."""
    weights = b.lane_weights(b.oracle(slot, q[0]))
    for lane, chosen in enumerate(b.chosen(q[0], slot)):
        left = sorted(set(range(weights.shape[1])) - chosen)
        assert len(chosen) == min(b.group.select, weights.shape[1])
        if not left:
            continue
        assert weights[lane, sorted(chosen)].min() >= weights[lane, left].max() * (1 - 1e-4)


def test_the_order_of_one_head_needs_no_normaliser(bench, tier):
    """Logits are so large that no softmax could distinguish them."""
    b = bench(tier, group=1, channels=16, select=7)
    keys = torch.zeros(40, 2, 16)
    keys[:, :, 0] = 2.0**12 + torch.arange(40)[:, None] / 8
    b.prefill(0, keys[torch.randperm(40, generator=b.case.generator(1))])
    values = b.keys[0][:39, :, 0]
    q = torch.zeros(1, 2, 16)
    q[..., 0] = 1.0
    q[0, 1, 0] = -1.0
    assert b.chosen(q) == [best(values[:, 0].tolist(), 7), best((-values[:, 1]).tolist(), 7)]


@pytest.mark.parametrize("label", ["bf16", "int4"])
@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_a_sample_weighs_the_heads(bench, tier, monkeypatch, label, scope):
    """float64 with the sample of the README; the heads are of very unequal sharpness."""

    @examples(tier, cpu=20, interpret=4)
    @given(seed=st.integers(0, 999), most=st.sampled_from([3, 8]), length=st.integers(20, 40))
    def check(seed, most, length):
        monkeypatch.setattr(reference, "SAMPLE", most)
        b = bench(tier, label=label, scope=scope, seed=seed, group=4, select=8)
        assert len(b.sample_of(length - 1)) <= most < length - 1
        b.prefill(0, torch.randn(length, 2, 16, generator=b.case.generator(1)))
        q = b.case.queries(1) * torch.tensor([0.25, 1, 4, 8]).repeat(2)[:, None]
        assert_best(b, q, 0)

    check()


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_a_needle_outside_of_the_sample_is_found(bench, tier, monkeypatch, scope):
    """No exponential holds the needle's logit beside the others, in either direction."""
    monkeypatch.setattr(reference, "SAMPLE", 8)
    b = bench(tier, scope=scope, group=2, select=2, channels=16, kv_heads=1)
    keys = torch.randn(40, 1, 16, generator=b.case.generator(1))
    keys[:, :, 0] = -300.0
    outside = sorted(set(range(39)) - set(b.sample_of(39)))
    needles = outside[3], outside[-2]
    keys[needles[0], :, 0], keys[needles[1], :, 1] = 900.0, 900.0
    b.prefill(0, keys)
    q = torch.zeros(1, 2, 16)
    q[0, 0, 0], q[0, 1, 1] = 8.0, 8.0
    assert b.chosen(q) == [set(needles)]


@pytest.mark.parametrize("label", ["bf16", "int4"])
def test_turns_of_kv_heads(bench, tier, monkeypatch, label):
    """A shared lane whose labels are too long for one load."""
    monkeypatch.setitem(launch.BUNDLES, (label == "int4", True), (32, 16))

    @examples(tier, cpu=4, interpret=3)
    @given(seed=st.integers(0, 999), kv_heads=st.sampled_from([3, 4]), length=st.integers(67, 90))
    def check(seed, kv_heads, length):
        shape = {"kv_heads": kv_heads, "units": 90, "page": 64 if seed % 2 else 2}
        b = bench(tier, label=label, scope="shared", seed=seed, channels=16, **shape)
        if tier.impl == "triton":
            assert b.algorithm.several[0].scoring["BUNDLES"] > 1
        b.prefill(1, torch.randn(length, kv_heads, 16, generator=b.case.generator(1)))
        assert_best(b, b.case.queries(1), 1)

    check()


@pytest.mark.parametrize("label", ["bf16", "int4"])
@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_many_tokens(bench, tier, label, scope):
    b = bench(tier, kv_heads=2, group=2, units=800, page=64, select=70, label=label, scope=scope)
    assert_long(b, 790)


def assert_long(b, length):
    keys = torch.randn(length, 2, 16, generator=b.case.generator(1))
    keys[length // 2 : length // 2 + 30] *= 4  # the maximum is in no first and no last block
    q = b.case.queries(1)
    b._prompt = b._prompt[:1].expand(length, -1, -1)
    start = torch.zeros(length, b.model.num_heads)
    b._hold(0, keys)
    b._set_rows([])
    k, prompt, lse = (x.to(b.device) for x in (keys, b._prompt, start))
    b.algorithm.construct(b.layer, 0, 0, k, k, prompt, lse)
    assert_best(b, q, 0)


def test_keys_that_differ_in_dropped_channels_tie(bench, tier, channel_file):
    order = [3, 0, 9, 12, *sorted(set(range(16)) - {0, 3, 9, 12})]
    path = channel_file({"0": channel_file.ranked(order, order)})

    @examples(tier, cpu=20, interpret=3)
    @given(seed=st.integers(0, 999), label=st.sampled_from(["bf16", "int4"]))
    def check(seed, label):
        b = bench(tier, channels=4, label=label, calibration=path, select=6)
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(30, 2, 16, generator=generator)
        keys[:, :, order[:4]] = keys[:1, :, order[:4]]
        b.prefill(0, keys)
        assert b.chosen(b.case.queries(1)[0]) == [set(range(6))] * 2

    check()


def test_a_constant_on_every_key_changes_nothing(bench, tier):
    @examples(tier, cpu=12, interpret=3)
    @given(seed=st.integers(0, 999), scope=st.sampled_from(["kv_head", "shared"]))
    def check(seed, scope):
        chosen, channels = [], []
        generator = torch.Generator().manual_seed(seed)
        keys, constant = grid(generator, 33, 2, 16), 8 * grid(generator, 1, 2, 16)
        for by in (0, constant):
            b = bench(tier, channels=4, scope=scope, seed=seed)
            b.prefill(0, keys + by)
            channels.append(b.chosen_channels(0))
            chosen.append(b.chosen(grid(torch.Generator().manual_seed(seed), 1, 4, 16)))
        assert torch.equal(*channels)
        assert chosen[0] == chosen[1]

    check()


def test_a_large_bias_of_a_channel_costs_4_bit_labels_hardly_anything(bench, tier):
    if tier.name == "interpret":
        pytest.skip("many launches; the formula is the same")
    found = {0.0: 0, 300.0: 0}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(60, 2, 16, generator=generator)
        q = torch.randn(1, 2, 16, generator=generator)
        for bias in found:
            b = bench(tier, group=1, channels=16, label="int4", seed=seed, select=8, units=80)
            b.prefill(0, keys + bias * (torch.arange(16) == 5))
            for head, chosen in enumerate(b.chosen(q)):
                exact = (keys[:59, head].double() @ q[0, head].double()).tolist()
                found[bias] += len(chosen & best(exact, 8))
    every = 20 * 2 * 8
    assert found[0.0] > 0.9 * every
    assert found[300.0] > found[0.0] - 0.05 * every


def test_more_channels_find_more_of_the_exact_selection_on_average(bench, tier):
    if tier.name == "interpret":
        pytest.skip("many launches; the formula is the same")
    recall = dict.fromkeys((2, 4, 8, 16), 0)
    for seed in range(30):
        for channels in recall:
            b = bench(tier, group=1, channels=channels, seed=seed, select=8)
            generator = torch.Generator().manual_seed(seed)
            spread = torch.rand(16, generator=generator) * 2
            b.prefill(0, torch.randn(40, 2, 16, generator=generator) * spread)
            q = torch.randn(1, 2, 16, generator=generator)
            for head, chosen in enumerate(b.chosen(q)):
                exact = (b.keys[0][:39, head].double() @ q[0, head].double()).tolist()
                recall[channels] += len(chosen & best(exact, 8))
    values = list(recall.values())
    assert values == sorted(values)
    every = 30 * 2 * 8
    assert values[-1] == every
    assert values[0] > every * 8 / 39, "no better than chance"


def test_latent_rows_of_many_heads(bench, tier):
    """All heads of latent attention meet one label; it is chosen from all elements of a row."""
    b = bench(tier, kv_heads=1, group=72, dim=80, channels=33, select=9, dtype=torch.bfloat16)
    b.prefill(1, torch.randn(39, 1, 80, generator=b.case.generator(1)).bfloat16())
    assert_best(b, b.case.queries(1), 1)
