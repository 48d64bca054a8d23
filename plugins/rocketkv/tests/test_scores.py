"""Scores of units against float64: what they bound and what they do not; and the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.rocketkv.tests import formulas
from topkv_rocketkv import reference
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.differences import require_same
from topkv_testing.kit import examples, subject_of
from topkv_testing.tiers import all_tiers
from topkv_testing.tolerance import assert_as_good


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
    ]
)
def subject(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return subject_of("rocketkv", "algorithm", request.param, AlgorithmOptions(units=40))


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scored(q, units, count):
    """The reference of queries ``[G, D]`` over the units ``[U, unit, D]`` of one kv-head."""
    valid = torch.ones(units.shape[:2], dtype=torch.bool)
    bounds = reference.minmax(units[:, :, None], valid)
    return reference.head_scores(q[None], bounds[None], torch.tensor([count]))[0]


SEEDS = st.integers(0, 999)


@given(seed=SEEDS, unit=st.sampled_from([1, 4, 16]), dim=st.sampled_from([5, 16]))
@settings(deadline=None, max_examples=40)
def test_one_head_and_all_channels_are_quest(seed, unit, dim):
    """No key of a unit has a larger product with the query."""
    q, units = drawn(seed, 1, dim), 3 * drawn(seed + 1, 6, unit, dim)
    got = scored(q, units, dim)
    torch.testing.assert_close(got.double(), formulas.quest(q, units), rtol=1e-5, atol=1e-5)
    assert (got[0] >= (units @ q[0]).amax(1) - 1e-4).all()


def test_a_head_of_the_other_sign_is_not_bounded():
    """q = (3, -1), one channel: the sum picks the maximum M, which the second head counts as -M,
    while its best key is worth -m.
    """
    q, units = torch.tensor([[3.0], [-1.0]]), torch.tensor([[[2.0], [5.0]]])
    got = scored(q, units, 1)
    assert got.tolist() == [[15.0], [-5.0]]
    assert got[1, 0] < (units[0] @ q[1]).max()
    assert formulas.quest(q, units)[1].item() == -2.0


@given(seed=SEEDS, group=st.sampled_from([2, 4]))
@settings(deadline=None, max_examples=40)
def test_the_sum_of_a_group_is_the_bound_of_its_summed_query(seed, group):
    """All channels are read, before the softmax: the sum is a bound, no single head's score is."""
    q, units = drawn(seed, group, 12), drawn(seed + 1, 6, 4, 12)
    summed = scored(q, units, 12).double().sum(0)
    expected = formulas.quest(q.double().sum(0, keepdim=True), units)[0]
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-4)


@given(seed=SEEDS, count=st.integers(1, 12), kind=st.sampled_from(["normal", "ties", "zero"]))
@settings(deadline=None, max_examples=60)
def test_the_channels_that_are_read_have_the_largest_queries(seed, count, kind):
    """The lower one of equal channels is read."""
    q = {"normal": drawn(seed, 3, 12), "ties": drawn(seed, 3, 12).round()}.get(kind)
    q = torch.zeros(3, 12) if q is None else q
    got = reference.best_channels(q[None, None], torch.tensor([count]))[0, 0]
    assert got.nonzero()[:, 0].tolist() == formulas.channels(q, count)


@given(seed=SEEDS, count=st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_temperatures_are_those_of_sparq(seed, count):
    """Scores times the logit scale are products over ``tau_g``."""
    q, units = drawn(seed, 4, 12), drawn(seed + 1, 6, 4, 12)
    got = scored(q, units, count).double() * 12**-0.5
    torch.testing.assert_close(got, formulas.scores(q, units, count), rtol=1e-4, atol=1e-5)


def test_kernels_score_and_read_what_the_formula_says(subject):
    """Sizes of keys, units in a page, channels and strides are of any kind, after drops."""
    if subject.tier.impl == "reference":
        pytest.skip("the reference is compared with the formula above")
    params = {"window": 2, "kernel": 3, "generated": 0}

    @examples(subject.tier, cpu=1, interpret=12, gpu=30)
    @given(case=cases(subject, exact=False), count=st.integers(1, 4), most=st.booleans())
    def check(case, count, most):
        read = case.geometry.dim if most else count
        case = evolve(case, params={**params, "channels": read}, select=2)
        bench, length = AlgorithmBench(subject, case, requests=3), case.most - 3
        for slot in (2, 0):
            bench.prefill(slot, case.tokens(slot)[:length])
        rows, q = [2, -1, 0], case.queries(3)
        q[1] = math.nan
        wide = torch.full((3, q.shape[2] + 1, q.shape[3]), math.nan, dtype=q.dtype)
        wide[:, :-1] = q[:, 0]
        bench._set_rows(rows)
        algorithm = bench.algorithm
        algorithm.heads.raw.fill_(-77)
        algorithm.lane_scores(bench.layer, wide.to(bench.device)[:, :-1])
        for row, slot in ((0, 2), (2, 0)):
            compare(bench, row, slot, q[row, 0], read)
        heads = bench.model.num_heads
        assert (algorithm.heads.raw[heads : 2 * heads] == -77).all(), "a padded row was scored"

    check()


def test_the_reference_scores_units_as_the_formula_says(subject):
    """Few channels or all of them are read, by heads of different temperatures."""
    if subject.tier.impl != "reference":
        pytest.skip("the scores of kernels are compared above")

    @examples(subject.tier, cpu=4, interpret=0, gpu=0)
    @given(case=cases(subject, exact=False), count=st.integers(1, 4))
    def check(case, count):
        bench = AlgorithmBench(subject, evolve(case, params={}))
        model, unit = bench.model, bench.group.unit
        q, units = drawn(count, model.num_heads, model.head_dim), drawn(5, 6, unit, model.head_dim)
        bounds = reference.minmax(units[:, :, None], torch.ones(6, unit, dtype=torch.bool))
        every = bounds.expand(-1, model.num_kv_heads, -1, -1)
        kept = {"bounds": every[None], "count": torch.tensor([count])}
        got = bench.algorithm.score(q[None], kept)[0]
        groups = got.split(model.group_size), q.split(model.group_size)
        for found, heads in zip(*groups, strict=True):
            truth = formulas.scores(heads, units, count)
            truth = truth * (model.scale * model.head_dim**0.5)
            torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)

    check()


def compare(bench, row, slot, q, read):
    """Raw scores and sides of one row, after ``lane_scores``."""
    model, group, algorithm = bench.model, bench.group, bench.algorithm
    closed = bench.selectable(slot)
    keys = bench.keys[slot][: closed * group.unit].unflatten(0, (closed, group.unit))
    raw = algorithm.heads.raw.cpu().unflatten(0, (-1, model.num_kv_heads, model.group_size))
    sides = algorithm.sides.cpu().unflatten(0, (-1, model.num_kv_heads))[row]
    for head, heads in enumerate(q.split(model.group_size)):
        expected = torch.zeros(model.head_dim, dtype=torch.int8)
        for i in formulas.channels(heads, read):
            expected[i] = 1 if heads[:, i].double().sum() > 0 else -1
        assert torch.equal(sides[head], expected)
        got = raw[row, head, :, :closed]
        dropped = bench.pools["dropped"][slot, head // group.heads_per_lane, :closed].bool().cpu()
        assert (got[:, dropped] == torch.tensor(reference.DROPPED)).all()
        truth = formulas.scores(heads, keys[:, :, head], read)
        rough = scored(heads, keys[:, :, head], read) * model.scale
        size = (heads.double().abs() @ keys[:, :, head].double().abs().amax((0, 1))).max()
        slack = 1e-6 * float(size) * float(model.scale) * 4
        left = ~dropped
        assert_as_good(got[:, left], truth[:, left], rough[:, left], f"head {head}", slack)
        assert (raw[row, head, :, closed:] == -77).all(), "a unit that is not closed was scored"


def test_bounds_token_by_token_are_those_at_once(subject):
    """Kernels and reference write the same bits, for pages of any number of units."""

    @examples(subject.tier, cpu=40, interpret=8, gpu=20)
    @given(case=cases(subject, exact=False, page_units=(1, 2, 8)), data=st.data())
    def check(case, data):
        length = data.draw(st.integers(2, min(case.most, 40)))
        start = data.draw(st.integers(1, length - 1))
        keys, stored = case.tokens(0)[:length], []
        for impl, first in (("reference", length), (subject.tier.impl, length), (None, start)):
            bench = AlgorithmBench(subject, case, impl=impl, requests=2)
            bench.prefill(1, keys[:first])
            for key in keys[first:]:
                bench.append([1, -1], torch.stack([key, key]))
            group = bench.group
            pages = reference.by_page(bench.pools["bounds"], group.units_per_page)
            rows = pages[bench.page_table[1].long()].flatten(0, 1)
            stored.append({"bounds": rows[: -(-length // group.unit)].cpu().contiguous()})
            if first == length:
                truth = keys[: length // group.unit * group.unit].unflatten(0, (-1, group.unit))
                low, high = stored[-1]["bounds"][: len(truth)].unbind(2)
                assert torch.equal(low, truth.amin(1) + 0.0)
                assert torch.equal(high, truth.amax(1) + 0.0)
        require_same(stored[1], stored[0], "bounds of a prompt")
        require_same(stored[2], stored[0], f"bounds of tokens decoded from {start} on")

    check()
