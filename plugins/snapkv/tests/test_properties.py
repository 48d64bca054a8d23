"""Decoding changes nothing of what a prompt kept, and looks at nothing but positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.memory import same_bits
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import examples, subject_of
from topkv_testing.tiers import all_tiers

WIDTH, ROOM = 9, 4
"""Tokens of a prompt that a lane keeps at most, and places for generated ones."""

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "window": st.integers(1, 4),
            "kernel": st.sampled_from([1, 3]),
            "outgrow": st.sampled_from(["refuse", "slide"]),
            "generated": st.just(ROOM),
        }
    ),
    selects=(WIDTH + ROOM,),
    units=40,
)


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
    ]
)
def subject(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return subject_of("snapkv", "algorithm", request.param, OPTIONS)


def test_the_kept_set_stays_and_generated_tokens_follow(subject):
    """Prompts beyond the cap, in every step: the same ids, then those since; no pool changes."""

    @examples(subject.tier, cpu=40, interpret=5)
    @given(case=cases(subject), lengths=st.tuples(*[st.integers(WIDTH + 1, 32)] * 2))
    def check(case, lengths):
        bench = AlgorithmBench(subject, case, requests=3)
        for slot, length in zip((2, 0), lengths, strict=True):
            bench.prefill(slot, case.tokens(slot)[:length])
        kept = bench.pools["kept"].tolist()
        before = bench.snapshot()
        for step in range(ROOM + 1):
            bench.append([2, -1, 0], case.tokens(5 + step)[:3])
            # Queries are not read, nor is any key: NaN stands for both.
            nan = torch.full_like(case.queries(3), torch.nan)
            ids = bench.retrieve(nan, [2, -1, 0]).tolist()
            assert all(set(lane) == {-1} for lane in ids[1])
            for row, slot, length in zip((ids[0], ids[2]), (2, 0), lengths, strict=True):
                since = list(range(length, length + step))
                for lane, held in zip(row, kept[slot], strict=True):
                    assert len({*held} - {-1}) == WIDTH
                    assert lane == [*held, *since, *[-1] * (ROOM - step)]
        assert same_bits(before, bench.snapshot())

    check()
