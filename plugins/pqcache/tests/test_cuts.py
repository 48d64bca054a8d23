"""Codebooks and open tokens behind rollbacks, truncations and forks, and without a place left."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from plugins.pqcache.tests.held import case_of, codebooks, cut_to, held, starts_of
from topkv_pqcache import reference
from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.cases import cases
from topkv_testing.differences import require_same
from topkv_testing.kit import examples


def test_a_window_that_is_rolled_back_leaves_nothing(subject):
    """The window's codebook is gone too: the request goes on as one that has never had it."""

    @examples(subject.tier, cpu=40, interpret=3)
    @given(
        case=cases(subject, exact=False),
        prompt=st.integers(10, 19),
        over=st.integers(0, 3),
        again=st.integers(1, 12),
    )
    def check(case, prompt, over, again):
        rejected = case.params["window"] + over
        case = evolve(case, ring=rejected + 1)
        used, fresh = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
        for bench in (used, fresh):
            bench.prefill(0, case.tokens(0)[:prompt])
        used.extend(0, case.tokens(1)[:rejected])
        assert len(starts_of(used)) == len(starts_of(fresh)) + 1
        used.rollback(0, prompt)
        for bench in (used, fresh):
            bench.extend(0, case.tokens(2)[:again])
        require_same(held(used, 0), held(fresh, 0), f"{rejected} tokens rejected")
        q = case.queries(1)
        assert lanes(used.retrieve(q, [0])) == lanes(fresh.retrieve(q, [0]))

    check()


def test_a_codebook_stays_while_one_of_its_tokens_is_left(subject):
    """Codes mean nothing without their codebook; what follows is open."""
    case = evolve(case_of(), ring=9)
    bench = AlgorithmBench(subject, case, requests=1)
    bench.prefill(0, case.tokens(0)[:12])
    bench.extend(0, case.tokens(1)[:8])
    before = held(bench, 0)
    assert before["starts"].tolist() == [0, 12]
    bench.rollback(0, 13)
    bench.extend(0, case.tokens(2)[:7])
    after = held(bench, 0)
    assert after["starts"].tolist() == [0, 12]
    assert torch.equal(after["codes"], before["codes"][:, :13])
    assert torch.equal(after["open"], case.tokens(2)[:7])
    bench.extend(0, case.tokens(2)[7:8])
    assert starts_of(bench) == [0, 12, 13]


def test_open_tokens_that_are_taken_back_leave_the_others_open(subject):
    case = evolve(case_of(), ring=9)
    bench = AlgorithmBench(subject, case, requests=1)
    bench.prefill(0, case.tokens(0)[:19])
    bench.extend(0, case.tokens(1)[:6])
    bench.rollback(0, 22)
    bench.extend(0, case.tokens(2)[:4])
    expected = torch.cat([case.tokens(1)[:3], case.tokens(2)[:4]])
    assert torch.equal(held(bench, 0)["open"], expected)
    bench.extend(0, case.tokens(2)[4:5])
    assert starts_of(bench) == [0, 19]
    new = AlgorithmBench(subject, case, requests=1)
    new.prefill(0, torch.cat([expected, case.tokens(2)[4:5]]))
    assert torch.equal(held(bench, 0)["codes"][:, 19:], held(new, 0)["codes"])


@pytest.mark.parametrize("length", [1, 19, 20, 21, 31, 32])
def test_truncation_forgets_codebooks_of_which_no_token_is_left(subject, length):
    """Tokens behind the cut get codes and codebooks as in a new request."""
    case = case_of()
    used = AlgorithmBench(subject, case, requests=1)
    keys, others = case.tokens(0), case.tokens(1)
    used.prefill(0, keys[:20])
    used.extend(0, keys[20:36])
    assert starts_of(used) == [0, 20, 28]
    used.rollback(0, 36)  # nothing is lost
    assert starts_of(used) == [0, 20, 28]
    cut_to(used, length)
    expected = [start for start in (0, 20, 28) if start < length]
    assert starts_of(used) == expected
    assert used.pools["state"][0, 1] == length
    used.prefill(0, others[:20])
    assert starts_of(used) == [*expected, length]
    new = AlgorithmBench(subject, case, requests=1)
    new.prefill(0, others[:20])
    one, two = held(used, 0), held(new, 0)
    assert torch.equal(one["codes"][:, length:], two["codes"])
    assert torch.equal(one["centroids"][:, len(expected)], two["centroids"][:, 0])


@pytest.mark.parametrize("settled", [True, False])
def test_a_fork_in_the_middle_of_a_window_changes_nothing_of_the_other(subject, settled):
    """A fork of a prompt that was not settled changes nothing either: both requests hold the same
    pages, and settle apart."""

    @examples(subject.tier, cpu=20, interpret=2)
    @given(case=cases(subject, exact=False), prompt=st.integers(8, 19), seed=st.integers(0, 9))
    def check(case, prompt, seed):
        window, keys = case.params["window"], case.tokens(0)
        decoded = window - 2 if settled else 0
        bench = AlgorithmBench(subject, case, requests=3)
        more = {slot: case.tokens(2 + slot)[:window] for slot in (0, 2)}
        alone = {slot: AlgorithmBench(subject, case, requests=3) for slot in (0, 2)}
        for each in (bench, *alone.values()):
            slot = next((s for s, a in alone.items() if a is each), 0)
            each.prefill(slot, keys[:prompt], settle=settled)
            each.extend(slot, keys[prompt : prompt + decoded])
        bench.fork(0, 2)
        order = (0, 2) if seed % 2 else (2, 0)
        for slot in order:
            for each in (bench, alone[slot]):
                if not settled:
                    each.prefill(slot, more[slot][:3])
                each.extend(slot, more[slot][3:])
        q = case.queries(1)
        for slot in order:
            require_same(held(bench, slot), held(alone[slot], slot), f"slot {slot} of a fork")
            assert lanes(bench.retrieve(q, [slot])) == lanes(alone[slot].retrieve(q, [slot]))

    check()


def test_where_places_run_out_tokens_go_by_the_last_codebook(subject):
    """Cuts of prompts over and over leave codebooks of few tokens; each step still selects."""
    case = case_of(units=32)
    bench = AlgorithmBench(subject, case, requests=1)
    books = bench.algorithm.books
    assert books == bench.group.max_units // 8
    for cut in range(1, 2 * books):
        keys = case.tokens(cut)[:9]
        bench.prefill(0, keys)
        assert len(starts_of(bench)) == min(cut, books)
        length = len(bench.keys[0]) - 8
        cut_to(bench, length)
    keys, before = case.tokens(50)[:9], held(bench, 0)
    bench.prefill(0, keys)
    starts, codes, centroids = codebooks(bench, 0)
    assert starts == before["starts"].tolist()
    assert torch.equal(centroids, before["centroids"])
    assert torch.equal(codes[:, :length], before["codes"])
    own = reference.encode(keys, centroids[:, books - 1]).transpose(0, 1)
    assert torch.equal(codes[:, length : length + 9], own)
    assert [len(lane) for lane in lanes(bench.retrieve(case.queries(1), [0]))[0]] == [5, 5]
