"""Positions that SnapKV keeps, against a float64 oracle over the full softmax."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases as kit_cases
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import subject_of
from topkv_testing.tiers import all_tiers
from topkv_testing.tolerance import assert_as_good

DEFAULTS = {"kernel": 3, "outgrow": "slide"}

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
    return subject_of("snapkv", "algorithm", request.param, AlgorithmOptions(units=48))


def examples(subject, count):
    few = subject.tier.name == "interpret"
    return settings(max_examples=max(1, count // 12) if few else count)


@st.composite
def cases(draw, subject, width=None, **fixed):
    """Random data; ``width`` is K - G."""
    case = draw(kit_cases(subject, keys=("normal",), exact=False))
    params = {
        **DEFAULTS,
        "window": draw(st.integers(1, 5)),
        "kernel": draw(st.sampled_from([1, 3, 5])),
        "generated": draw(st.integers(1, 4)),
        **fixed,
    }
    width = width or params["window"] + draw(st.integers(1, 12))
    return evolve(case, params=params, select=width + params["generated"])


def weights(case, keys, count, first=0):
    """float64 ``[W, Hkv, G, n]``: softmax of the last ``count`` rows of a prompt, causal."""
    g, n = case.geometry, len(keys)
    rows = torch.arange(n - count, n)
    q = case.queries(case.most, SALT)[rows, 0].double().unflatten(1, (g.kv_heads, g.group))
    logits = torch.einsum("whgd,nhd->whgn", q, keys.double()) * g.dim**-0.5
    hidden = torch.arange(n) > rows[:, None]
    return logits.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)


def by_lane(case, mass):
    """``[W, Hkv, G, n]`` to the sum of each lane ``[lanes, n]``."""
    return mass.sum((0, 2)).unflatten(0, (case.geometry.lane_heads, -1)).sum(1)


def pooled(row, kernel):
    """One lane's votes, pooled with loops."""
    half = kernel // 2
    return [max(row[max(i - half, 0) : i + half + 1]) for i in range(len(row))]


def scores(case, keys):
    """float64 pooled votes of the positions before the window, a list for each lane."""
    p = case.params
    count = min(p["window"], len(keys))
    mass = by_lane(case, weights(case, keys, count))[:, : len(keys) - count]
    return [pooled(row, p["kernel"]) for row in mass.tolist()]


def top(values, count):
    """Indices of the best values; of equal ones the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def assert_chosen(got, values, count):
    """``got`` is the top-k of the oracle's values, up to what fp32 cannot distinguish."""
    expected = set(top(values, count))
    assert len(got) == len(expected)
    for one, other in zip(sorted(got - expected), sorted(expected - got), strict=True):
        assert abs(values[one] - values[other]) <= 1e-5 * max(values), (got, expected)


def kept(bench, slot):
    """The kept positions of each lane as they are stored, checked for form."""
    rows = bench.pools["kept"][slot].tolist()
    for row, count in zip(rows, bench.pools["count"][slot].tolist(), strict=True):
        assert row[:count] == sorted(set(row[:count]))
        assert set(row[count:]) <= {-1}
    return [{i for i in row if i >= 0} for row in rows]


def cuts_of(data, length):
    return data.draw(st.lists(st.integers(1, max(length - 1, 1)), max_size=8))


def test_votes_are_the_softmax_mass_of_the_window(subject):
    """Votes are never negative, sum up to every voter's whole row, and do not depend on blocks."""

    @examples(subject, 40)
    @given(case=cases(subject), length=st.integers(6, 40), data=st.data())
    def check(case, length, data):
        bench = AlgorithmBench(subject, case, requests=2)
        keys = case.tokens(0)[:length]
        bench.prefill(1, keys, cuts_of(data, length), settle=False)
        edges = sorted({0, length, *cuts_of(data, length)})
        history = [(a, keys[a:b].to(bench.device), None) for a, b in pairwise(edges)]
        got = bench.algorithm.votes(bench.layer, 1, length, history)
        assert (got >= 0).all()
        truth = weights(case, keys, case.params["window"])
        assert_as_good(got, by_lane(case, truth), by_lane(case, truth.float()), "votes", 1e-5)
        g = case.geometry
        heads = g.kv_heads * g.group // g.lane_heads
        total = got.double().sum(1) / heads
        assert (total - case.params["window"]).abs().max() < 1e-4

    check()


def test_what_is_kept_is_the_best_and_the_window(subject):
    """Chunks of a prompt, shorter than the window or not, make no difference."""

    @examples(subject, 80)
    @given(case=cases(subject), length=st.integers(1, 40), data=st.data())
    def check(case, length, data):
        once, chunks = (AlgorithmBench(subject, case, requests=2) for _ in range(2))
        keys, p = case.tokens(0)[:length], case.params
        once.prefill(1, keys)
        chunks.prefill(1, keys, cuts_of(data, length))
        assert torch.equal(once.pools["kept"], chunks.pools["kept"])
        cap = case.select - p["generated"]
        if length <= cap:
            assert kept(once, 1) == [set(range(length))] * case.geometry.lane_heads
            return
        window = set(range(length - p["window"], length))
        for got, values in zip(kept(once, 1), scores(case, keys), strict=True):
            assert window <= got
            assert len(got) == cap
            assert_chosen(got - window, values, cap - p["window"])

    check()


def test_without_pooling_it_is_top_k_of_the_votes(subject):
    """It keeps the best of the plain column sums where kernel = 1."""

    @examples(subject, 20)
    @given(case=cases(subject, kernel=1), length=st.integers(20, 40))
    def check(case, length):
        keys, window = case.tokens(0)[:length], case.params["window"]
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, keys)
        mass = by_lane(case, weights(case, keys, window))[:, :-window].tolist()
        for got, values in zip(kept(bench, 0), mass, strict=True):
            count = case.select - case.params["generated"] - window
            assert_chosen({i for i in got if i < length - window}, values, count)

    check()


def test_a_larger_cap_keeps_all_that_a_smaller_one_keeps(subject):
    @examples(subject, 20)
    @given(data=st.data(), length=st.integers(10, 40))
    def check(data, length):
        case = data.draw(cases(subject, width=6))
        before = None
        for width in (6, 7, 11, 20, 40):
            wider = evolve(case, select=width + case.params["generated"])
            bench = AlgorithmBench(subject, wider, requests=1)
            bench.prefill(0, case.tokens(0)[:length])
            now = kept(bench, 0)
            assert before is None or all(a <= b for a, b in zip(before, now, strict=True))
            before = now

    check()


def test_a_needle_is_kept_with_its_neighbours(subject):
    """A key that the last query alone attends, and ``kernel // 2`` keys on each side of it."""

    @examples(subject, 30)
    @given(data=st.data(), length=st.integers(20, 40), kernel=st.sampled_from([1, 3, 5, 7]))
    def check(data, length, kernel):
        window = data.draw(st.integers(1, 5))
        pooling = {"window": window, "kernel": kernel}
        case = data.draw(cases(subject, width=window + kernel, **pooling))
        case = evolve(case, geometry=evolve(case.geometry, group=1, scope="kv_head"))
        where = data.draw(st.integers(0, length - window - 1))
        keys = case.tokens(0)[:length] / 8
        q = case.queries(case.most, SALT)[length - 1, 0].float()
        keys[where] = (40 * q / q.norm(dim=-1, keepdim=True)).to(keys.dtype)
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, keys)
        mass = by_lane(case, weights(case, keys, window)[-1:])[:, where]
        assume((mass > 0.9).all())
        half = kernel // 2
        around = set(range(max(where - half, 0), min(where + half + 1, length)))
        assert all(around <= lane for lane in kept(bench, 0))

    check()
