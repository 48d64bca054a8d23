"""Codes, tables and estimates against float64, and the kernels' codes bit for bit."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from plugins.pqcache.tests.held import reconstructed
from topkv_pqcache import reference
from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.differences import require_same
from topkv_testing.kit import examples, subject_of
from topkv_testing.strategies import Geometry, key_kinds, seeds
from topkv_testing.tiers import tier

REQUESTS, HEADS, GROUP, BOOKS, PART = 2, 3, 2, 4, 5


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds(), subvectors=st.integers(1, 3), bits=st.integers(0, 4))
def test_a_score_is_q_times_the_reconstructed_key(seed, subvectors, bits):
    tokens, count, dim = 17, 1 << bits, subvectors * PART
    centroids = drawn(seed, REQUESTS, HEADS, BOOKS, subvectors, count, PART)
    generator = torch.Generator().manual_seed(seed)
    shape = (REQUESTS, HEADS, tokens, subvectors)
    codes = torch.randint(0, count, shape, generator=generator).to(torch.uint8)
    book = torch.randint(0, BOOKS, (REQUESTS, tokens), generator=generator)
    q = drawn(seed + 1, REQUESTS, HEADS * GROUP, dim)
    got = reference.coded_scores(q, codes, book, centroids)
    for row in range(REQUESTS):
        keys = reference.reconstruct(codes[row], book[row], centroids[row]).double()
        for head in range(HEADS * GROUP):
            expected = keys[head // GROUP] @ q[row, head].double()
            torch.testing.assert_close(got[row, head].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_key_is_put_together_of_its_own_centroids():
    """Centroids are of the token's codebook and head, sub-vector by sub-vector."""
    subvectors, count, tokens = 2, 3, 11
    centroids = drawn(1, HEADS, BOOKS, subvectors, count, PART)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, count, (HEADS, tokens, subvectors), generator=generator)
    book = torch.randint(0, BOOKS, (tokens,), generator=generator)
    got = reference.reconstruct(codes.to(torch.uint8), book, centroids)
    for head in range(HEADS):
        for token in range(tokens):
            own = centroids[head, book[token]]
            parts = [own[i, codes[head, token, i]] for i in range(subvectors)]
            assert torch.equal(got[head, token], torch.cat(parts))


@given(seed=seeds(), subvectors=st.integers(1, 3), count=st.sampled_from([1, 2, 5, 16, 256]))
def test_a_code_is_the_nearest_centroid(seed, subvectors, count):
    """Codes do not depend on how much is encoded at a time; of two equal ones the lower wins."""
    k = drawn(seed, 9, HEADS, subvectors * PART)
    centroids = drawn(seed + 1, HEADS, subvectors, count, PART)
    codes = reference.encode(k, centroids)
    parts = k.double().unflatten(-1, (subvectors, PART))[..., None, :]
    distances = (parts - centroids.double()).square().sum(-1)
    chosen = distances.gather(3, codes.long()[..., None])[..., 0]
    assert (chosen <= distances.amin(3) * (1 + 1e-5)).all()
    if count < 256:
        again = reference.encode(k, torch.cat([centroids, centroids], 2))
        assert torch.equal(again, codes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "AT_ONCE", 1)
        assert torch.equal(reference.encode(k, centroids), codes)


@given(starts=st.lists(st.integers(0, 30), max_size=5, unique=True), spare=st.integers(0, 2))
def test_a_token_goes_by_the_last_codebook_that_starts_before_it(starts, spare):
    starts = sorted(starts)
    pool = torch.tensor(starts + [0] * spare, dtype=torch.int32)
    got = reference.book_of(torch.arange(32), pool, torch.tensor(len(starts)))
    expected = [max((i for i, s in enumerate(starts) if s <= t), default=0) for t in range(32)]
    assert got.tolist() == expected


def test_the_error_of_a_score_is_bounded_by_that_of_the_key(subject):
    """``|q.k - score| <= sum_i |q_i| |k_i - mu_i|``, whatever the keys are."""

    @examples(subject.tier, cpu=40, interpret=3)
    @given(case=cases(subject, exact=False), kind=key_kinds())
    def check(case, kind):
        bench = AlgorithmBench(subject, evolve(case, keys=kind), requests=1)
        bench.prefill(0, bench.case.tokens(0)[:50])
        near, keys = reconstructed(bench, 0).double(), bench.keys[0].double()
        assert len(near) == len(keys) == 50
        q = case.queries(1)[0, 0].double().unflatten(0, (keys.shape[1], -1))
        error = torch.einsum("nhd,hgd->nhg", keys - near, q).abs()
        parts = bench.algorithm.subvectors
        far = (keys - near).unflatten(-1, (parts, -1)).norm(dim=-1)
        sizes = q.unflatten(-1, (parts, -1)).norm(dim=-1)
        bound = torch.einsum("nhm,hgm->nhg", far, sizes)
        assert (error <= bound * (1 + 1e-9)).all()

    check()


def test_few_different_keys_are_kept_exactly_and_so_is_the_top_k(subject):
    """Keys have no more values than centroids: all error is the rounding of a mean."""

    @examples(subject.tier, cpu=40, interpret=3)
    @given(case=cases(subject, keys=("normal",)), seed=seeds())
    def check(case, seed):
        bench = AlgorithmBench(subject, case, requests=1)
        values = case.tokens(1)[: bench.algorithm.count]
        generator = torch.Generator().manual_seed(seed)
        keys = values[torch.randint(0, len(values), (50,), generator=generator)]
        bench.prefill(0, keys)
        near = reconstructed(bench, 0)
        eps = torch.finfo(keys.dtype).eps
        assert (near - keys.float()).abs().max() <= eps * keys.float().abs().max()
        q = case.queries(1)
        ids = lanes(bench.retrieve(q, [0]))[0]
        lane_heads, k = bench.group.lane_heads, bench.group.select
        logits = torch.einsum(
            "nhd,hgd->nhg", keys[:49].double(), q[0, 0].double().unflatten(0, (keys.shape[1], -1))
        )
        shares = (logits * bench.model.scale).softmax(0).flatten(1).unflatten(1, (lane_heads, -1))
        worth = shares.mean(-1).T
        for lane, chosen in zip(worth, ids, strict=True):
            best = lane.sort(descending=True).values[:k]
            torch.testing.assert_close(lane[chosen].sum(), best.sum(), rtol=1e-3, atol=1e-9)

    check()


LENGTHS = (1, 2, 128, 129, 130, 1025, 2200)
CODED = (0, 1, 0, 128, 129, 1024, 2150)
STARTS = ([], [0], [], [0, 1, 2], [0, 127, 128], [0, 128, 1022, 1023], [0, 700, 1100, 2100])
"""First tokens of codebooks: beside the kernel's tiles and blocks, and where codes end."""


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scope", ["kv_head", "shared"])
@pytest.mark.parametrize(("group", "bits"), [(1, 1), (3, 6)])
def test_kernels_score_what_the_formula_says(name, scope, group, bits):
    """Codebooks and codes at random, nothing trained; up to what sums in fp32 get wrong."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    subject = subject_of("pqcache", "algorithm", on)
    params = {"subvectors": 3, "bits": bits, "window": 512, "segment": 1024}
    geometry = Geometry(2, group, 72, 1, 16, scope, torch.float32)
    case = Case(geometry, params, 5, 2, "normal", bits, 2304, 0.0, exact=False)
    q, found, generator = case.queries(8), [], torch.Generator().manual_seed(bits)
    slots = [3, 0, -1, 6, 1, 5, 2, 4]
    for impl in ("reference", "triton"):
        bench = AlgorithmBench(subject, case, impl=impl, requests=8)
        generator.manual_seed(bits)
        for slot, (length, starts) in enumerate(zip(LENGTHS, STARTS, strict=True)):
            bench.keys[slot] = torch.zeros(length, 2, 72)  # for its length
            pools = {name: pool[slot] for name, pool in bench.pools.items()}
            codes = torch.randint(0, 1 << bits, pools["codes"].shape, generator=generator)
            pools["codes"].copy_(codes)
            for each in ("centroids", "keys"):
                pools[each].copy_(torch.randn(pools[each].shape, generator=generator))
            pools["starts"][: len(starts)] = torch.tensor(starts, dtype=torch.int32)
            pools["state"].copy_(torch.tensor([len(starts), CODED[slot]]))
        bench._set_rows(slots)
        if impl == "triton":
            for scratch in (bench.algorithm.heads.raw, bench.algorithm.heads.scores):
                scratch.fill_(float("nan"))
        scores, closed = bench.algorithm.lane_scores(bench.layer, q[:, 0].to(bench.device))
        found.append((scores.cpu(), closed.cpu()))
    assert torch.equal(found[0][1], found[1][1])
    rows = [slot for slot in slots for _ in range(bench.group.lane_heads)]
    expected = [LENGTHS[slot] - 1 if slot >= 0 else 0 for slot in rows]
    assert found[0][1].tolist() == expected
    for lane, tokens in enumerate(expected):
        one, two = (scores[lane, :tokens] for scores, _ in found)
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_kernels_write_what_the_reference_writes(name):
    """Bits are those of the reference, for prompts, steps and windows, though codes follow from
    rounded sums."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    subject = subject_of("pqcache", "algorithm", on)

    @examples(on, cpu=1, interpret=6)
    @given(
        case=cases(subject, exact=False, dims=(12, 40), keys=("normal", "ties")),
        params=st.fixed_dictionaries(
            {
                "subvectors": st.sampled_from([1, 2, 4]),
                "bits": st.sampled_from([1, 5, 8]),
                "window": st.just(8),
                "segment": st.sampled_from([16, 48]),
            }
        ),
    )
    def check(case, params):
        case, stored = evolve(case, params=params, least_units=64), []
        for impl in ("reference", "triton"):
            bench = AlgorithmBench(subject, case, impl=impl)
            bench.prefill(1, case.tokens(1)[:37])
            bench.extend(1, case.tokens(2)[:13])
            stored.append({name: pool.cpu() for name, pool in bench.pools.items()})
        require_same(stored[1], stored[0], "pools of kernels")
        assert stored[0]["state"][1].tolist() == [4 if params["segment"] == 16 else 2, 45]
        assert (stored[0]["codes"][1] != 0).any()
        open_ = stored[0]["keys"][1][:, torch.arange(45, 50) % 16].transpose(0, 1)
        assert torch.equal(open_, case.tokens(2)[8:13])

    check()
