"""Training of codebooks: when, on what, and how tokens without one are scored meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from plugins.pqcache.tests.held import (
    PARAMS,
    case_of,
    codebooks,
    held,
    reconstructed,
    starts_of,
)
from topkv.errors import ConfigError
from topkv_pqcache import reference
from topkv_pqcache.kmeans import kmeans
from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.cases import cases
from topkv_testing.differences import require_same
from topkv_testing.kit import examples


@pytest.mark.parametrize("length", [8, 9, 19, 20, 21, 39, 40, 41, 59, 60, 61, 63])
def test_a_prompt_is_cut_into_equal_parts_of_half_a_segment_or_more(subject, length):
    """Lengths are beside each edge; each part has the centroids that it alone gives."""
    case = case_of()
    bench = AlgorithmBench(subject, case, requests=1)
    keys = case.tokens(0)[:length]
    bench.prefill(0, keys)
    starts = starts_of(bench)
    edges = [*starts, length]
    sizes = [end - start for start, end in pairwise(edges)]
    assert starts[0] == 0
    assert len(starts) == -(-length // 20)
    assert max(sizes) - min(sizes) <= 1
    assert len(starts) == 1 or min(sizes) >= 10
    whole = held(bench, 0)
    for book, (start, end) in enumerate(pairwise(edges)):
        alone = AlgorithmBench(subject, evolve(case, params={**PARAMS, "segment": 64}), requests=1)
        alone.prefill(0, keys[start:end])
        part = held(alone, 0)
        assert torch.equal(part["centroids"][:, 0], whole["centroids"][:, book])
        assert torch.equal(part["codes"], whole["codes"][:, start:end])


def test_a_codebook_is_what_kmeans_makes_of_each_sub_vector(subject):
    """Each head has a codebook of its own, by the parameters; another seed gives another one."""
    case = case_of(bits=3, iterations=2)
    keys, made = case.tokens(0)[:20], []
    for seed in (0, 1):
        case = evolve(case, params={**case.params, "seed": seed})
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, keys)
        made.append(codebooks(bench, 0)[2][:, 0])
        for head in range(2):
            for part in range(2):
                own = keys[None, :, head, 4 * part : 4 * part + 4].contiguous()
                expected = kmeans(own, 8, 2, seed)[0]
                torch.testing.assert_close(made[-1][head, part], expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(*made)


def test_all_open_tokens_have_a_place_where_a_step_appends_several(subject):
    """A prompt leaves almost a window open, and decoding adds one and the drafts of a step."""
    case, window = case_of(), PARAMS["window"]
    bench, keys = AlgorithmBench(subject, case, requests=1, max_queries=4), case.tokens(0)
    end = 2 * window - 2
    bench.prefill(0, keys[: window - 1])
    bench.extend(0, keys[window - 1 : end])
    bench.append_several([0], keys[None, end : end + 4], [4])
    assert torch.equal(held(bench, 0)["open"], keys[: end + 4])


def test_chunks_of_a_prompt_do_not_matter(subject):
    @examples(subject.tier, cpu=40, interpret=4)
    @given(
        case=cases(subject, exact=False),
        length=st.integers(1, 60),
        cuts=st.lists(st.integers(1, 59), max_size=5),
    )
    def check(case, length, cuts):
        keys = case.tokens(0)[:length]
        once, chunks = (AlgorithmBench(subject, case, requests=2) for _ in range(2))
        once.prefill(1, keys)
        chunks.prefill(1, keys, cuts)
        require_same(held(chunks, 1), held(once, 1), f"chunks that end at {cuts}")

    check()


def test_a_full_window_of_decoded_tokens_gets_a_codebook_of_its_own(subject):
    """Tokens of a window that is not full are open; older codes and codebooks stay."""

    @examples(subject.tier, cpu=30, interpret=3)
    @given(case=cases(subject, exact=False), prompt=st.integers(12, 19), windows=st.integers(1, 2))
    def check(case, prompt, windows):
        window = case.params["window"]
        keys = case.tokens(0)[: prompt + windows * window]
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, keys[:prompt])
        for end in range(prompt + window, len(keys) + 1, window):
            before = held(bench, 0)
            bench.extend(0, keys[end - window : end - 1])
            assert bench.pools["state"][0].tolist() == [len(before["starts"]), end - window]
            assert torch.equal(held(bench, 0)["open"], keys[end - window : end - 1])
            bench.append([0], keys[end - 1 : end])
            after, books = held(bench, 0), len(before["starts"])
            assert after["starts"].tolist() == [*before["starts"].tolist(), end - window]
            assert torch.equal(after["codes"][:, : end - window], before["codes"])
            assert torch.equal(after["centroids"][:, :books], before["centroids"])
            new = reference.encode(keys[end - window : end], after["centroids"][:, books])
            assert torch.equal(after["codes"][:, end - window :], new.transpose(0, 1))
            assert len(after["open"]) == 0

    check()


@pytest.mark.parametrize("shift", [3.0, 10.0])
def test_decoded_tokens_that_drift_away_are_found_in_an_open_window_and_in_a_full_one(
    subject, shift
):
    """Keys are far from those of the prompt, whose centroids say nothing about them."""
    case = case_of(bits=3, segment=32)
    keys = case.tokens(0)[:45]
    keys[32:] += shift
    bench = AlgorithmBench(subject, case, requests=1)
    bench.prefill(0, keys[:32])
    bench.extend(0, keys[32:39])
    q = torch.zeros(1, 1, 4, 8)
    q[..., 0] = 5

    def check(length):
        best = keys[: length - 1, :, 0].topk(3, 0).indices.T.tolist()
        for tokens, lane in zip(best, lanes(bench.retrieve(q, [0]))[0], strict=True):
            assert set(tokens) <= set(lane)

    check(39)
    by_prompt = reference.encode(keys[32:40], codebooks(bench, 0)[2][:, 0]).transpose(0, 1)
    book = torch.zeros(8, dtype=torch.long)
    frozen = reference.reconstruct(by_prompt, book, codebooks(bench, 0)[2])
    bench.append([0], keys[39:40])
    assert starts_of(bench) == [0, 32]
    trained = reconstructed(bench, 0)[32:] - keys[32:40]
    error = (frozen.transpose(0, 1) - keys[32:40]).norm()
    assert trained.norm() < error / 50, "as many centroids as tokens, and they are kept no better"
    check(40)
    bench.extend(0, keys[40:])
    check(45)


def test_short_turns_stay_open_until_they_are_a_window(subject):
    """Decoded tokens between turns stay open too; and nothing is lost of what came before."""
    case = case_of()
    bench = AlgorithmBench(subject, case, requests=1)
    keys = case.tokens(0)
    for start, end, how in ((0, 3, "prompt"), (3, 5, "decoded"), (5, 7, "prompt")):
        if how == "prompt":
            bench.prefill(0, keys[start:end])
        else:
            bench.extend(0, keys[start:end])
        assert bench.pools["state"][0].tolist() == [0, 0]
        assert torch.equal(held(bench, 0)["open"], keys[:end])
    bench.prefill(0, keys[7:12])
    assert bench.pools["state"][0].tolist() == [1, 12]
    alone = AlgorithmBench(subject, case, requests=1)
    alone.prefill(0, keys[:12])
    require_same(held(bench, 0), held(alone, 0), "a window of turns")


@pytest.mark.parametrize(("prompts", "books"), [((8, 7), 2), ((7,), 1), ((3, 2, 2), 1)])
def test_most_open_tokens_there_can_be(subject, prompts, books):
    """A prompt leaves 7 of a window of 8 open, and decoding adds 8 more before it settles."""
    case = case_of(units=64)
    bench = AlgorithmBench(subject, case, requests=1)
    keys = case.tokens(0)
    done = 0
    for count in prompts:
        bench.prefill(0, keys[done : done + count])
        done += count
    coded = done - 7
    bench.extend(0, keys[done : done + 7])
    bench.update(bench.stage([0], keys[done + 7 : done + 8]))  # and is not settled yet
    assert torch.equal(held(bench, 0)["open"], keys[coded : done + 8])
    bench.settle_due([0])
    assert bench.pools["state"][0].tolist() == [books, done + 8]
    alone = AlgorithmBench(subject, case, requests=1)
    alone.prefill(0, keys[coded : done + 8])
    one, two = held(bench, 0), held(alone, 0)
    assert torch.equal(one["codes"][:, coded:], two["codes"])


def test_a_history_that_lacks_keys_is_refused(subject):
    bench = AlgorithmBench(subject, case_of(), requests=1)
    k = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="expected keys from position 3 on, got some at 5"):
        bench.algorithm.settle(bench.layer, 0, 3, 9, [(5, k, k)])
    with pytest.raises(ValueError, match="expected keys up to position 9, got 7"):
        bench.algorithm.settle(bench.layer, 0, 3, 9, [(3, k, k)])
    assert bench.pools["state"][0].tolist() == [0, 0]


def test_all_that_is_wrong_is_said_at_once(subject):
    for bad, reported in (
        (
            {"bits": 9, "iterations": -1, "seed": 0.5},
            [
                "parameter bits of pqcache must be <= 8, got 9",
                "parameter iterations of pqcache must be >= 0, got -1",
                "parameter seed of pqcache must be an int, got 0.5",
            ],
        ),
        ({"window": 40, "segment": 50}, ["segment must be at least twice the window, got 50"]),
        ({"subvectors": 3}, ["subvectors must divide the head dim, 8, got 3; set one of [1, 2,"]),
    ):
        with pytest.raises(ConfigError) as refused:
            AlgorithmBench(subject, evolve(case_of(), params={**PARAMS, **bad}), requests=1)
        for part, reason in zip(reported, refused.value.reasons, strict=True):
            assert part in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("subvectors", "bits"), [(2, 6), (4, 6), (4, 8)])
def test_pools_have_the_bytes_of_the_readme(subject, dtype, subvectors, bits):
    """``m`` a token and kv-head, ``2^b D s`` a codebook and kv-head, and two windows of keys."""
    heads, dim, tokens = 3, 16, 64
    params = {"subvectors": subvectors, "bits": bits, "window": 16, "segment": 32}
    case = case_of(heads, dim, dtype, units=tokens, **params)
    bench = AlgorithmBench(subject, case, requests=2)
    each = {name: pool[0].nbytes for name, pool in bench.pools.items()}
    assert each == {
        "codes": tokens * heads * subvectors,
        "centroids": tokens // 16 * heads * 2**bits * dim * dtype.itemsize,
        "starts": tokens // 16 * 4,
        "keys": 2 * 16 * heads * dim * dtype.itemsize,
        "state": 8,
    }
