"""Selections of the indexer against float64 scores of the keys that it keeps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_deepseek_dsa import launch
from topkv_deepseek_dsa.launch import DeepSeekDSATriton
from topkv_testing.tolerance import assert_as_good

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def scores_of(w, q, weights, slots):
    """The implementation's own scores ``[B, U]``, on the CPU."""
    w.rows(slots)
    q, weights = q[:, 0].to(w.device), weights.to(w.device)
    if isinstance(w.indexer, DeepSeekDSATriton):
        w.indexer.launcher.scores.fill_(torch.nan)
        return w.indexer.launcher.score(w.layer, q, weights)[0].cpu().clone()
    lengths = w.layer.step.lengths[:, None]
    tokens = torch.arange(w.group.max_units, device=w.device).expand(len(slots), -1)
    tokens = torch.where(tokens < lengths, tokens, 0)
    each = w.layer.step.slots.clamp(min=0)[:, None].expand_as(tokens)
    return w.indexer._score(w.layer, each, tokens, q, weights).cpu()


def check_against_float64(w, slots):
    q, weights = w.queries(len(slots))
    sets = w.retrieve(q, weights, slots)
    scores = scores_of(w, q, weights, slots)
    for row, slot in enumerate(slots):
        length = len(w.keys[slot])
        truth = w.oracle(slot, q[row, 0], weights[row])
        rough = w.rough(slot, q[row, 0], weights[row])
        if length <= w.group.select:
            assert sets[row] == set(range(length))
            continue
        slack = w.slack(slot, q[row, 0], weights[row])
        assert_as_good(scores[row, :length], truth, rough, f"row {row}", slack)
        off = (scores[row, :length].double() - truth).abs().max()
        left = sorted(set(range(length)) - sets[row])
        assert truth[sorted(sets[row])].min() >= truth[left].max() - 2 * off


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(4, 16), (20, 32)])
def test_scores_and_selection_agree_with_float64(world, impl, device, form, dtype, heads, dim):
    make = {"keys": form, "dtype": dtype, "heads": heads, "dim": dim}
    check_against_float64(world.filled(impl, device, **make), [0, 1, 2])


def test_the_shape_of_the_model(world, impl, device, form):
    make = {"heads": 64, "dim": 128, "scale_format": "ue8m0"}
    check_against_float64(world.filled(impl, device, keys=form, **make), [1, 0])


@pytest.mark.parametrize(("kept", "page"), [("bf16", 16), ("bf16", 48), ("fp8", 192)])
def test_pages_of_other_sizes(world, impl, device, kept, page):
    make = {"keys": kept, "page": page, "pages": 6, "lengths": (90, 33, 48)}
    check_against_float64(world.filled(impl, device, **make), [2, 0, 1])


@pytest.mark.parametrize("columns", [0, 32, 256])
@pytest.mark.parametrize("queries", [2, 3, 4])
def test_several_queries_rank_by_the_best_of_them(
    world, impl, device, form, queries, columns, monkeypatch
):
    """In one product, and one product after the other; padding has any bits."""
    monkeypatch.setattr(launch, "COLUMNS", dict.fromkeys(launch.COLUMNS, columns))
    w = world.filled(impl, device, keys=form, max_queries=4, requests=4)
    slots, appended = [1, 0, -1, 2], [0, queries, 0, queries - 1]
    q, weights = w.several(4, queries)
    for row, count in enumerate(appended):
        q[row, max(count, 1) :], weights[row, max(count, 1) :] = torch.nan, torch.nan
    sets = w.retrieve_several(q, weights, slots, appended)
    for row, slot in enumerate(slots):
        real = range(max(appended[row], 1))
        length = len(w.keys[slot]) - len(real) if slot >= 0 else 0
        if length <= w.group.select:
            assert sets[row] == set(range(length))
            continue
        asked = [(slot, q[row, nth], weights[row, nth]) for nth in real]
        truth, rough = (
            torch.stack([score(*each) for each in asked]).amax(0)[:length]
            for score in (w.oracle, w.rough)
        )
        off = 2 * (rough.double() - truth).abs().max() + 2**-21 * truth.abs().max()
        off += max(w.slack(*each) for each in asked)
        left = sorted(set(range(length)) - sets[row])
        assert truth[sorted(sets[row])].min() >= truth[left].max() - 2 * off


def whole(generator, *shape):
    return torch.randint(-3, 4, shape, generator=generator).float()


def whole_case(w, tokens, ties):
    """Whole numbers whose codes are themselves: a 448 in each row makes its scale 1.

    Every sum is exact, on tensor cores too, and many scores are equal.
    """
    keys, q = whole(w.generator, tokens, w.dim), whole(w.generator, 1, 1, w.heads, w.dim)
    if ties:
        which = torch.randint(0, min(9, tokens), (tokens,), generator=w.generator)
        keys = keys[which]
    if w.fp8:
        keys[:, 0], keys[:, 1], q[..., 0], q[..., 1] = 448, 0, 0, 448
    weights = whole(w.generator, 1, w.heads)
    exact = (q[0, 0].double() @ keys.T.double()).relu().T @ weights[0].double()
    return keys.to(w.model.dtype), q.to(w.model.dtype), weights, exact.tolist()


def best(scores, count):
    """The set of the best, of equal ones the lower."""
    return set(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:count])


@pytest.mark.parametrize("ties", [False, True])
def test_whole_numbers_are_selected_exactly(world, impl, device, form, ties):
    @given(seed=st.integers(0, 999), tokens=st.integers(1, 250), heads=st.sampled_from([1, 4, 17]))
    @settings(deadline=None, max_examples=8)
    def check(seed, tokens, heads):
        w = world(impl, device, keys=form, seed=seed, heads=heads, dim=32)
        keys, q, weights, exact = whole_case(w, tokens, ties)
        w.prefill(1, keys)
        assert w.retrieve(q, weights, [1]) == [best(exact, 8)]
        if tokens > 8:
            found = scores_of(w, q, weights, [1])[0, :tokens]
            assert found.tolist() == exact

    check()


def test_permuted_heads_score_the_same(world, impl, device, form):
    """Queries and weights are permuted alike; sums of whole numbers have no order."""
    w = world(impl, device, keys=form, heads=8, dim=32)
    keys, q, weights, _ = whole_case(w, 200, False)
    w.prefill(0, keys)
    order = torch.randperm(8, generator=w.generator)
    one, two = (scores_of(w, q[:, :, by], weights[:, by], [0]) for by in (torch.arange(8), order))
    assert torch.equal(one[0, :200], two[0, :200])
    mixed = scores_of(w, q[:, :, order], weights, [0])
    assert not torch.equal(one[0, :200], mixed[0, :200])


def test_weights_of_zero_select_the_lowest_tokens(world, impl, device, form):
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(3)
    assert w.retrieve(q, weights * 0, [0, 1, 2]) == [set(range(8)), set(range(8)), set(range(5))]


def test_negative_weights_never_select_padding(world, impl, device, form):
    """Every score is negative; the numbers behind the length are not."""
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(3)
    q[:] = q.abs()
    for slot in range(3):
        w.prefill(slot, w.keys[slot].abs())
    if impl == "triton":
        w.indexer.launcher.scores.fill_(1e9)
    sets = w.retrieve(q, -weights.abs(), [0, 1, 2])
    truth = w.oracle(1, q[1, 0], -weights[1].abs())
    assert (truth < 0).all()
    assert truth[sorted(sets[1])].min() >= truth.topk(9).values[-1] - 1e-2 * truth.abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_powers_of_two_select_the_same(world, impl, device, form, scale_format):
    """Powers of two as factors of queries, of weights, and of all keys change no selection."""

    @given(seed=st.integers(0, 99), exponent=st.sampled_from([-3, -1, 1, 3]))
    @settings(deadline=None, max_examples=4)
    def check(seed, exponent):
        make = {"keys": form, "seed": seed, "scale_format": scale_format, "dtype": torch.float32}
        w = world.filled(impl, device, **make)
        q, weights = w.queries(1)
        factor = 2.0**exponent
        expected = w.retrieve(q, weights, [0])
        assert w.retrieve(q * factor, weights, [0]) == expected
        assert w.retrieve(q, weights * factor, [0]) == expected
        w.prefill(0, w.keys[0] * factor)
        assert w.retrieve(q, weights, [0]) == expected

    check()


def test_hadamard_keeps_the_ranking_in_fp32(world, impl, device):
    make = {"keys": "bf16", "dtype": torch.float32, "dim": 128, "heads": 16, "select": 32}
    plain, turned = (world.filled(impl, device, hadamard=h, **make) for h in (False, True))
    q, weights = plain.queries(1)
    one, two = (w.retrieve(q, weights, [0])[0] for w in (plain, turned))
    truth = plain.oracle(0, q[0, 0], weights[0])
    order = truth.argsort(descending=True)
    ranked = [scores_of(w, q, weights, [0])[0, :250].double() for w in (plain, turned)]
    # Neighbours that differ by more than fp32 rounds in float64 are ordered alike by both.
    band = max((scores - truth).abs().max() for scores in ranked)
    assert band <= 2**-18 * truth.abs().max()
    apart = truth[order][:-1] - truth[order][1:] > 2 * band
    assert apart.sum() > 200
    for scores in ranked:
        assert (scores[order][:-1] > scores[order][1:])[apart].all()
    assert apart[31]
    assert one == two == set(order[:32].tolist())


def test_hadamard_turns_what_is_kept(world, impl, device, form):
    plain, turned = (
        world.filled(impl, device, keys=form, hadamard=h, dim=128) for h in (False, True)
    )
    q, weights = plain.queries(1)
    assert not torch.allclose(plain.decoded(0), turned.decoded(0), atol=0.1)
    exact = weights[0].double() @ (q[0, 0].double() @ plain.keys[0].double().T).relu()
    for w in (plain, turned):
        found = scores_of(w, q, weights, [0])[0, :250].double()
        assert (found - exact).abs().max() <= 0.15 * exact.std()


def test_pages_may_lie_anywhere(world, impl, device, form):
    worlds = [world(impl, device, keys=form, seed=seed) for seed in (0, 1)]
    assert not torch.equal(worlds[0].table, worlds[1].table)
    keys, (q, weights) = worlds[0].random(250), worlds[0].queries(1)
    for w in worlds:
        w.prefill(0, keys)
    one, two = (scores_of(w, q, weights, [0])[0, :250] for w in worlds)
    assert torch.equal(one, two)
    assert worlds[0].retrieve(q, weights, [0]) == worlds[1].retrieve(q, weights, [0])


def test_rows_do_not_see_each_other(world, impl, device, form):
    """Padded rows, whose queries are NaN, and what is behind a length are not seen either."""
    w = world.filled(impl, device, keys=form, requests=5, lengths=(250, 70, 5, 129, 64))
    q, weights = w.queries(5)
    alone = [w.retrieve(q[i : i + 1], weights[i : i + 1], [i])[0] for i in range(5)]
    q[1], weights[1] = torch.nan, torch.nan
    assert w.retrieve(q, weights, [0, -1, 2, 3, 4]) == [alone[0], set(), *alone[2:]]


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("garbage", [0xFF, 0x7E, 0x00])
def test_garbage_behind_a_length_has_no_influence(world, impl, device, form, garbage):
    w = world.filled(impl, device, keys=form, lengths=(200, 70, 129))
    q, weights = w.queries(3)
    expected = w.retrieve(q, weights, [0, 1, 2])
    for slot, length in enumerate((200, 70, 129)):
        w.overwrite(slot, torch.arange(length, 256), garbage)
    if impl == "triton":
        w.indexer.launcher.scores.fill_(torch.nan)
    assert w.retrieve(q, weights, [0, 1, 2]) == expected


def test_lengths_at_their_edges(world, impl, device, form):
    lengths = [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256]
    w = world.filled(impl, device, keys=form, requests=13, lengths=lengths)
    check_against_float64(w, list(range(13)))


def test_the_newest_token_competes(world, impl, device, form):
    w = world.filled(impl, device, keys=form, lengths=(100, 100))
    q, weights = w.queries(2)
    weights = weights.abs()
    for factor in (1, -1):
        newest = (q[:, 0].float().mean(1) * 20 * factor).to(q.dtype)
        w.append([0, 1], newest)
        last = len(w.keys[0]) - 1
        for row, chosen in enumerate(w.retrieve(q, weights, [0, 1])):
            truth = w.oracle(row, q[row, 0], weights[row])
            assert (last in chosen) == (truth[last] >= truth.topk(8).values[-1])
            assert (last in chosen) == (factor == 1)


def test_selections_are_nested(world, impl, device, form):
    sets = []
    for select in (1, 2, 7, 30, 100, 256):
        w = world.filled(impl, device, keys=form, select=select)
        sets.append(w.retrieve(*w.queries(3), [0, 1, 2]))
    for few, many in pairwise(sets):
        assert all(a <= b for a, b in zip(few, many, strict=True))
    assert sets[-1] == [set(range(250)), set(range(70)), set(range(5))]


def test_queries_and_weights_may_lie_at_any_stride(world, impl, device, form):
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(3)
    expected = w.retrieve(q, weights, [0, 1, 2])
    wide = torch.full((3, 1, w.heads + 2, w.dim), torch.nan, dtype=q.dtype)
    wide[:, :, 1:-1] = q
    apart = torch.full((3, 1, w.heads, 2 * w.dim), torch.nan, dtype=q.dtype)
    apart[..., ::2] = q
    turned = weights.T.contiguous().T
    assert w.retrieve(wide[:, :, 1:-1], turned, [0, 1, 2]) == expected
    assert w.retrieve(apart[..., ::2], turned, [0, 1, 2]) == expected


def test_fp32_queries_are_taken(world, impl, device, form):
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(3)
    assert w.retrieve(q.float(), weights, [0, 1, 2]) == w.retrieve(q, weights, [0, 1, 2])
