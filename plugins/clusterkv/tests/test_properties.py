"""Properties that hold for any data: windows, empty clusters, the size of a query, bytes."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.memory import same_bits
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import examples, subject_of
from topkv_testing.strategies import Geometry

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "tokens_per_cluster": st.integers(2, 4),
            "window": st.integers(4, 7),
            "sinks": st.integers(0, 2),
            "segment": st.sampled_from([8, 24]),
            "iterations": st.just(3),
        }
    ),
    selects=(8, 12),
    units=40,
)


@pytest.fixture
def subject(on):
    return subject_of("clusterkv", "algorithm", on, OPTIONS)


def taken(bench, slot):
    """Places of each pool that a request has taken, on the CPU."""
    pools = {name: pool[slot].cpu() for name, pool in bench.pools.items()}
    _, built, clusters, _ = pools["state"].tolist()
    members = built - bench.algorithm.settings.sinks
    widths = {"centroids": clusters, "ends": clusters, "members": max(members, 0)}
    return {name: pools[name][:, :width].contiguous() for name, width in widths.items()}


def test_a_window_makes_the_same_clusters_in_a_prompt_and_in_decode(subject):
    """Clusters are only appended: at once, in chunks and token by token, the same members.

    The means are of the same keys, but a device may add those up in another order.
    """

    @examples(subject.tier, cpu=30, interpret=3)
    @given(
        case=cases(subject, exact=False),
        prompt=st.integers(0, 2),
        decoded=st.integers(1, 2),
        cuts=st.lists(st.integers(1, 39), max_size=3),
    )
    def check(case, prompt, decoded, cuts):
        window = case.params["window"]
        sinks = min(case.params["sinks"], 1) * window
        case = evolve(case, params={**case.params, "segment": window, "sinks": sinks})
        first, last = max(sinks + prompt * window, 1), sinks + (prompt + decoded) * window
        if prompt == sinks == 0:
            first, last = window, (1 + decoded) * window
        keys = case.tokens(0)[:last]
        once, chunks, steps = (AlgorithmBench(subject, case, requests=2) for _ in range(3))
        once.prefill(1, keys)
        chunks.prefill(1, keys, cuts)
        steps.prefill(1, keys[:first])
        steps.extend(1, keys[first:])
        assert once.pools["state"][1].tolist()[:2] == [last, last]
        for other in (chunks, steps):
            assert other.pools["state"][1].tolist() == once.pools["state"][1].tolist()
            one, two = taken(once, 1), taken(other, 1)
            assert same_bits(one["ends"], two["ends"])
            assert same_bits(one["members"], two["members"])
            eps = torch.finfo(one["centroids"].dtype).eps
            gap = (one["centroids"].double() - two["centroids"].double()).abs()
            assert (gap <= 2 * eps * keys.double().abs().max()).all()

    check()


def test_an_empty_cluster_has_a_centroid_of_numbers(subject):
    """Fewer directions than clusters: some hold nothing, and no reader meets a NaN."""

    @examples(subject.tier, cpu=20, interpret=3)
    @given(case=cases(subject, keys=("constant",), exact=False), zeros=st.booleans())
    def check(case, zeros):
        bench = AlgorithmBench(subject, case, requests=1)
        keys = case.tokens(0) * (0 if zeros else 1)
        bench.prefill(0, keys[:30])
        bench.extend(0, keys[30:])
        held = taken(bench, 0)
        sizes = held["ends"].diff(prepend=torch.zeros_like(held["ends"][:, :1]))
        assert (sizes == 0).any()
        assert (sizes.sum(1) == held["members"].shape[1]).all()
        assert held["centroids"].isfinite().all()

    check()


def test_one_query_head_selects_by_direction_alone(subject):
    """No mean of softmaxes is taken without a group: q times c > 0 selects what q selects."""

    @examples(subject.tier, cpu=30, interpret=3)
    @given(case=cases(subject, groups=(1,)), exponent=st.sampled_from([-4, -1, 2, 6]))
    def check(case, exponent):
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, case.tokens(0)[:37])
        q = case.queries(1)
        one, two = (lanes(bench.retrieve(x, [0])) for x in (q, q * 2.0**exponent))
        assert one == two

    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "per_cluster"), [(12, 3), (12, 4), (5, 5)])
def test_pools_have_the_bytes_of_the_readme(on, dtype, window, per_cluster):
    """``(s D + 4) / t + 4`` a token and kv-head, and the keys that are not clustered yet."""
    windows, heads, dim, sinks = 7, 3, 16, 4
    tokens = sinks + windows * window
    case = Case(
        Geometry(heads, 2, dim, 1, 1, "kv_head", dtype),
        {"tokens_per_cluster": per_cluster, "window": window, "segment": 12, "sinks": sinks},
        *(9, 3, "normal", 0),
        least_units=tokens,
        stale=0.0,
    )
    subject = subject_of("clusterkv", "algorithm", on, OPTIONS)
    bench = AlgorithmBench(subject, case, requests=2)
    held = {name: pool[0].nbytes / heads for name, pool in bench.pools.items()}
    clustered = tokens - sinks + 8 * window  # with the eight windows more of the README
    clusters = clustered / per_cluster + tokens // 12  # and one more a segment
    assert held["centroids"] + held["ends"] == (dtype.itemsize * dim + 4) * clusters
    assert held["members"] == 4 * tokens
    assert held["keys"] == (2 * window + bench.group.ring_slots) * dtype.itemsize * dim
    assert set(held) == {"centroids", "ends", "members", "keys", "state"}
    assert held["state"] * heads == 16


def test_chunks_of_a_prompt_do_not_matter(subject):
    """Segments are at fixed positions, whether chunks or the host tier bring their keys."""

    @examples(subject.tier, cpu=40, interpret=4)
    @given(
        case=cases(subject, exact=False),
        windows=st.integers(1, 5),
        cuts=st.lists(st.integers(1, 47), max_size=6),
        again=st.integers(0, 9),
    )
    def check(case, windows, cuts, again):
        case = evolve(case, params={**case.params, "segment": case.params["window"] * windows})
        keys = case.tokens(0)[: min(48, case.most - 1)]
        prompt = max(len(keys) - again, 1)
        once, chunks = (AlgorithmBench(subject, case, requests=2) for _ in range(2))
        for bench, at in ((once, ()), (chunks, cuts)):
            bench.prefill(1, keys[:prompt], at)
            if prompt < len(keys):  # another turn
                bench.prefill(1, keys[prompt:], [cut - prompt for cut in at])
        assert chunks.pools["state"][1].tolist() == once.pools["state"][1].tolist()
        one, two = taken(once, 1), taken(chunks, 1)
        assert all(same_bits(one[name], two[name]) for name in one)

    check()


def test_clusters_of_a_prefix_depend_on_what_follows(subject):
    """A segment ends where the prompt does: whoever takes a page over has to replay it."""

    @examples(subject.tier, cpu=15, interpret=2)
    @given(case=cases(subject, keys=("normal",), exact=False))
    def check(case):
        params = case.params
        case = evolve(
            case, params={**params, "segment": 40 // params["window"] * params["window"]}
        )
        first = params["sinks"] + 3 * params["window"]
        labels = []
        for salt in range(1, 6):
            bench = AlgorithmBench(subject, case, requests=1)
            assert bench.spec.prefix == "replay"
            bench.prefill(0, torch.cat([case.tokens(0)[:first], case.tokens(salt)[first:]]))
            held = taken(bench, 0)
            order = held["members"].tolist()
            labels.append([[token for token in head if token < first] for head in order])
        assert any(other != labels[0] for other in labels)

    check()
