"""Units that a prompt keeps, against float64 votes over the full softmax."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.rocketkv.tests import formulas
from topkv.errors import ConfigError
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases as kit_cases
from topkv_testing.algorithm.memory import made
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import subject_of
from topkv_testing.tiers import all_tiers

SALT = 62
"""Seed of the prompt's queries in a bench."""


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
    ]
)
def subject(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return subject_of("rocketkv", "algorithm", request.param, AlgorithmOptions(units=96))


def examples(subject, count):
    few = subject.tier.name == "interpret"
    return settings(max_examples=max(1, count // 12) if few else count, deadline=None)


@st.composite
def cases(draw, subject, kernels=(63, 3, 1)):
    """Random data, units of one token, and a prompt budget that the longest prompt exceeds."""
    case = draw(kit_cases(subject, keys=("normal",), exact=False, units=(1,)))
    window = draw(st.integers(1, 5))
    params = {
        "window": window,
        "kernel": draw(st.sampled_from(kernels)),
        "prompt_budget": max(window, case.select) + draw(st.integers(1, 30)),
    }
    return evolve(case, params=params)


def kept(bench, slot):
    """The units that each lane keeps."""
    units = -(-len(bench.keys[slot]) // bench.group.unit)
    return [
        {unit for unit in range(units) if not row[unit]}
        for row in bench.pools["dropped"][slot].tolist()
    ]


def values(case, keys, first):
    """Pooled votes of the positions before the window, in float64, a list for each lane; the
    voters are the prompt's queries from ``first`` on.
    """
    g, window, n = case.geometry, case.params["window"], len(keys)
    q = case.queries(case.most, SALT)[first:n, 0]
    each = keys.repeat_interleave(g.group, 1)
    size = g.kv_heads * g.group // g.lane_heads
    found = []
    for heads in torch.arange(g.kv_heads * g.group).split(size):
        mass = formulas.votes(q[:, heads], each[:, heads], g.dim**-0.5, first)
        found.append(formulas.pooled(mass[: n - window], case.params["kernel"]))
    return found


def assert_chosen(got, row, count):
    """``got`` is the top-k of the oracle's votes, up to what fp32 cannot distinguish."""
    expected = set(formulas.top(row, count))
    assert len(got) == len(expected)
    for one, other in zip(sorted(got - expected), sorted(expected - got), strict=True):
        assert abs(row[one] - row[other]) <= 1e-5 * max(row), (got, expected)


def test_a_prompt_keeps_the_best_votes_and_its_window(subject):
    """SnapKV's vote, summed over window and group; chunks of the prompt make no difference."""

    @examples(subject, 60)
    @given(case=cases(subject), length=st.integers(1, 95), data=st.data())
    def check(case, length, data):
        once, chunks = (AlgorithmBench(subject, case, requests=2) for _ in range(2))
        keys, window = case.tokens(0)[:length], case.params["window"]
        once.prefill(1, keys)
        cuts = data.draw(st.lists(st.integers(1, length), max_size=3))
        chunks.prefill(1, keys, cuts)
        assert torch.equal(once.pools["dropped"], chunks.pools["dropped"])
        budget = case.params["prompt_budget"]
        if length <= budget:
            assert kept(once, 1) == [set(range(length))] * case.geometry.lane_heads
            return
        tail = set(range(length - window, length))
        for got, row in zip(kept(once, 1), values(case, keys, length - window), strict=True):
            assert tail <= got
            assert len(got) == budget
            assert_chosen(got - tail, row, budget - window)

    check()


def test_a_unit_stays_for_one_token_that_is_kept(subject):
    """Larger units drop what none of their tokens keeps, and nothing else."""

    @examples(subject, 30)
    @given(case=cases(subject, (3, 1)), length=st.integers(40, 95), unit=st.sampled_from([2, 4]))
    def check(case, length, unit):
        geometry = evolve(case.geometry, unit=unit)
        budget = max(case.params["prompt_budget"], (case.select + 1) * unit)
        params = {**case.params, "prompt_budget": budget}
        wide = evolve(case, geometry=geometry, params=params)
        benches = []
        for each in (evolve(case, params=params), evolve(wide, least_units=-(-96 // unit))):
            bench = AlgorithmBench(subject, each, requests=1)
            bench.prefill(0, case.tokens(0)[:length])
            benches.append(kept(bench, 0))
        for tokens, units in zip(*benches, strict=True):
            assert units == {token // unit for token in tokens}

    check()


def test_a_later_prompt_votes_anew_over_everything(subject):
    """Units that one turn dropped may be kept by the next.

    Tokens decoded in between are voted over too, and queries of earlier turns have no vote, where
    the new prompt is shorter than the window too.
    """

    @examples(subject, 40)
    @given(case=cases(subject), first=st.integers(30, 60), second=st.integers(1, 20))
    def check(case, first, second):
        bench, keys = AlgorithmBench(subject, case, requests=1), case.tokens(0)
        window, budget = case.params["window"], case.params["prompt_budget"]
        bench.prefill(0, keys[:first])
        before = kept(bench, 0)
        bench.extend(0, keys[first : first + 3])
        decoded = set(range(first, first + 3))
        assert kept(bench, 0) == [lane | decoded for lane in before]
        bench.prefill(0, keys[first + 3 : first + 3 + second])
        length = first + 3 + second
        if length <= budget:
            assert kept(bench, 0) == [set(range(length))] * case.geometry.lane_heads
            return
        rows = values(case, keys[:length], max(length - window, first + 3))
        for got, row in zip(kept(bench, 0), rows, strict=True):
            assert_chosen({i for i in got if i < length - window}, row, budget - window)

    check()


def test_a_prompt_that_lost_its_end(subject):
    """The voters that are left choose again. Without any, what was kept before stays."""

    @examples(subject, 30)
    @given(case=cases(subject), length=st.integers(70, 90), data=st.data())
    def check(case, length, data):
        window, budget = case.params["window"], case.params["prompt_budget"]
        bench = AlgorithmBench(subject, evolve(case, ring=16), requests=2)
        keys = case.tokens(0)
        bench.prefill(0, keys[:length])
        bench.fork(0, 1)
        before = kept(bench, 0)
        left = length - data.draw(st.integers(1, 2 * window))
        bench.rollback(1, left)
        bench.extend(1, keys[left : left + 2])
        assert all({left, left + 1} <= lane for lane in kept(bench, 1)), "before any settle"
        bench.rollback(0, left)
        assert kept(bench, 0) == [{i for i in lane if i < left} for lane in before]
        bench._settle(0)
        now = kept(bench, 0)
        assert all(len(lane) == budget for lane in now)
        assert all(set(range(left - window, left)) <= lane for lane in now)
        if left > length - window:
            rows = values(case, keys[:left], length - window)
            for got, row in zip(now, rows, strict=True):
                assert_chosen({i for i in got if i < left - window}, row, budget - window)
        else:
            for lane, then in zip(now, before, strict=True):
                stays = {i for i in then if i < left - window}
                assert len(stays - lane) <= max(len(stays) - (budget - window), 0)

    check()


def test_part_of_the_history_is_refused(subject):
    @examples(subject, 1)
    @given(case=cases(subject))
    def check(case):
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, case.tokens(0)[:80])
        blocks = list(bench._history(0, 0))
        settle = bench.algorithm.settle
        with pytest.raises(ValueError, match="from position 0"):
            settle(bench.layer, 0, 0, 80, blocks[1:])
        with pytest.raises(ValueError, match="votes over its 80 tokens"):
            settle(bench.layer, 0, 0, 80, blocks[:-1])

    check()


def test_wrong_parameters_are_refused_together(subject):
    @examples(subject, 1)
    @given(case=kit_cases(subject))
    def check(case):
        values = {"window": 0, "kernel": 4, "generated": -1, "sticky": -1.0}
        sizes = {"channels": case.geometry.dim + 1, "prompt_budget": case.geometry.unit}
        for wrong in (values, sizes):
            with pytest.raises(ConfigError) as raised:
                make(subject, case, wrong)
            assert len(raised.value.reasons) == len(wrong)
        for name in values | sizes:
            with pytest.raises(ConfigError, match=name):
                make(subject, case, {name: "many"})

    def make(subject, case, params):
        made(subject, evolve(case, params=params), subject.tier.impl, 1)

    check()
