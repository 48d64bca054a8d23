"""Selected tokens against float64 scores of what is stored, and the cost of selecting."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import GroupShape, ModelShape
from topkv_clusterkv.algorithm import ClusterKV
from topkv_clusterkv.entry import topkv_register_algorithms
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import examples, params_of, subject_of
from topkv_testing.strategies import Geometry

(ENTRY,) = topkv_register_algorithms()
OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "tokens_per_cluster": st.integers(2, 4),
            "window": st.integers(4, 8),
            "sinks": st.integers(0, 2),
            "segment": st.sampled_from([8, 24]),
            "iterations": st.just(3),
        }
    ),
    selects=(10, 16, 23),
    units=40,
)


NEEDLES = Case(
    Geometry(2, 2, 16, 1, 4, "kv_head", torch.bfloat16),
    {"tokens_per_cluster": 5, "window": 10, "segment": 64, "sinks": 2, "iterations": 8},
    select=16,
    ring=2,
    keys="normal",
    seed=0,
    least_units=56,
    stale=float("nan"),
)


@pytest.fixture
def subject(on):
    return subject_of("clusterkv", "algorithm", on, OPTIONS)


def clusters_of(bench, slot, head):
    """Members and float64 centroid of each cluster as stored."""
    pools = {name: pool[slot].cpu() for name, pool in bench.pools.items()}
    count = int(pools["state"][2])
    edges = [0, *pools["ends"][head, :count].tolist()]
    members = pools["members"][head].tolist()
    return [
        (members[edges[c] : edges[c + 1]], pools["centroids"][head, c].double())
        for c in range(count)
    ]


def true_scores(bench, q, head, clusters):
    """float64 mean softmax over the head's queries, of clusters with members; in logarithms."""
    group, scale = bench.model.group_size, bench.model.scale
    q = q[0, head * group : (head + 1) * group].double()
    logits = torch.stack([q @ centroid for _, centroid in clusters], 1) * scale
    logits[:, [not members for members, _ in clusters]] = -torch.inf
    return torch.logsumexp(logits.log_softmax(1), 0), logits.abs().nan_to_num(posinf=0).max()


def check_selection(bench, slot, q, ids):
    sinks, window = bench.algorithm.settings.sinks, len(bench.keys[slot]) - 1
    closed = max(min(int(bench.pools["state"][slot, 0]), window), min(sinks, window))
    forced = [*range(window - 1, closed - 1, -1), *range(min(sinks, window) - 1, -1, -1)]
    for head, row in enumerate(ids.tolist()):
        chosen = {token for token in row if token >= 0}
        assert len(chosen) == min(window, len(row))
        assert set(forced[: len(row)]) <= chosen
        clusters = clusters_of(bench, slot, head)
        if not clusters or len(forced) >= len(row):
            assert chosen == set(forced[: len(row)])
            continue
        scores, size = true_scores(bench, q, head, clusters)
        slack = 1e-5 * (1 + float(size))
        whole, cut, left = [], [], []
        for (members, _), score in zip(clusters, scores.tolist(), strict=True):
            members = [token for token in members if token < closed]
            taken = [token for token in members if token in chosen]
            assert taken == members[: len(taken)], "a cluster is cut behind its first members"
            if taken and len(taken) == len(members):
                whole.append(score)
            elif taken:
                cut.append(score)
            elif members:
                left.append(score)
        assert len(cut) <= 1, "more than one cluster is cut"
        worst = min([*whole, *cut], default=torch.inf)
        assert worst >= max(left, default=-torch.inf) - slack
        assert min(whole, default=torch.inf) >= max(cut, default=-torch.inf) - slack


def test_whole_clusters_by_falling_score_and_only_the_last_is_cut(subject):
    @examples(subject.tier, cpu=60, interpret=10)
    @given(case=cases(subject, exact=False), data=st.data())
    def check(case, data):
        bench = AlgorithmBench(subject, case, requests=2)
        for slot in range(2):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths(most=30))], [7, 20])
        q = case.queries(2)
        ids = bench.retrieve(q, [1, 0])
        for row, slot in enumerate((1, 0)):
            check_selection(bench, slot, q[row], ids[row])
        # Rejected tokens count for nothing, in a graph as well as here.
        length = len(bench.keys[0])
        bench.keys[0] = bench.keys[0][: data.draw(st.integers(max(1, length // 2), length))]
        check_selection(bench, 0, q[0], bench.retrieve(q[:1], [0])[0])
        bench.append([0], case.tokens(3)[:1])
        check_selection(bench, 0, q[0], bench.retrieve(q[:1], [0])[0])

    check()


def test_stored_clusters_are_permutations_in_order(subject):
    @examples(subject.tier, cpu=30, interpret=5)
    @given(case=cases(subject, exact=False), cuts=st.lists(st.integers(1, 39), max_size=3))
    def check(case, cuts):
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, case.tokens(0), cuts)
        sinks, built = case.params["sinks"], case.most
        assert bench.pools["state"][0, :2].tolist() == [built, built]
        for head in range(case.geometry.kv_heads):
            clusters = clusters_of(bench, 0, head)
            every = [token for members, _ in clusters for token in members]
            assert sorted(every) == list(range(sinks, built))
            for members, centroid in clusters:
                assert members == sorted(members), "not stable"
                if members:
                    keys = bench.keys[0][members, head].double()
                    eps = torch.finfo(case.geometry.dtype).eps
                    bound = (eps + 1e-6) * keys.abs().max()
                    assert (centroid - keys.mean(0)).abs().max() <= bound

    check()


def test_planted_needles_of_the_paper(subject):
    """A few tokens scattered over the prompt answer the query: all are recalled at once.

    There are more clusters than topics, so that each topic gets one of its own.
    """

    @examples(subject.tier, cpu=20, interpret=3)
    @given(
        seed=st.integers(0, 999),
        where=st.lists(st.integers(2, 49), min_size=3, max_size=5, unique=True),
    )
    def check(seed, where):
        case = evolve(NEEDLES, seed=seed)
        bench = AlgorithmBench(subject, case, requests=1)
        generator = torch.Generator().manual_seed(seed)
        topics = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q * 4
        keys = topics[1 + torch.randint(0, 5, (case.most, 2), generator=generator)]
        keys[where] = topics[0]
        keys = keys * (1 + torch.rand(*keys.shape[:2], 1, generator=generator))
        bench.prefill(0, keys.bfloat16())
        q = (topics[0] * 2).expand(1, 1, case.geometry.group * 2, -1).bfloat16()
        for lane in bench.retrieve(q, [0])[0].tolist():
            assert set(where) <= set(lane)

    check()


def made(tokens, unit=1, **params):
    model = ModelShape(1, 32, 8, 128, torch.bfloat16, 128**-0.5)
    group = GroupShape(
        *((0,), unit, 8, 1, 128, torch.bfloat16, 64, 1, tokens // unit, 1023, 4096, 32)
    )
    made_of, device = params_of(ENTRY, params), torch.device("cpu")
    # The reference asks for no top-k.
    return ClusterKV(AlgorithmSetup(model, group, made_of, device, topk=pytest.fail))


@pytest.mark.parametrize(("tokens", "share"), [(32768, 0.054), (131072, 0.044)])
def test_bytes_are_those_of_the_readme(tokens, share):
    algorithm = made(tokens)
    counted = {
        spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta").nbytes / 8
        for spec in algorithm.spec().representations
    }
    clusters = ((tokens - 16) // 320 + 8) * 20 + tokens // 8192
    assert counted["centroids"] == 256 * clusters
    assert counted["ends"] == 4 * clusters
    assert counted["members"] == 4 * tokens
    assert counted["keys"] == (2 * 320 + 32) * 256
    index = sum(counted[name] for name in ("centroids", "ends", "members")) / tokens
    assert index / 512 == pytest.approx(0.0396, abs=3e-3)
    assert sum(counted.values()) / tokens / 512 < share


def test_wrong_parameters_are_refused_together():
    with pytest.raises(ConfigError) as raised:
        made(4096, window=0, iterations=True, seed=-1)
    assert len(raised.value.reasons) == 3
    for change, what in (
        ({"segment": 100}, "segment must be at least window"),
        ({"tokens_per_cluster": 4}, "raise tokens_per_cluster"),
        ({"clusters": 4}, "unknown parameter 'clusters'"),
    ):
        with pytest.raises(ConfigError, match=what):
            made(131072, **change)
