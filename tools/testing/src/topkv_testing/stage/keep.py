"""Scores of pages by ``ScoresPages.keep`` of topkv-dropping. Part of the stage suite."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from torch import Tensor

from topkv.types import LayerView
from topkv_dropping.stage import ScoresPages
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, rounded_cases
from topkv_testing.algorithm.kernels import require_both
from topkv_testing.algorithm.memory import same_bits
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.stage.oracles import exact_keys, stage_options_of


def keeper(bench: AlgorithmBench) -> tuple[ScoresPages, LayerView]:
    """The stage, and the layer as it sees it; skips stages that score no pages."""
    for link in bench.algorithm.links:
        if isinstance(link.stage, ScoresPages):
            return link.stage, link.view(bench.layer)
    pytest.skip(f"{bench.subject.entry.name} scores no pages")


def worth(bench: AlgorithmBench, slot: int, dropped: int = 0) -> Tensor:
    """fp32 ``[lane_heads, pages]`` of the full pages of a request, on the CPU, poisoned before.

    Args:
        dropped: tokens that the request has given back before.
    """
    stage, view = keeper(bench)
    length = len(bench.keys[slot])
    shape = (bench.group.lane_heads, length // bench.group.page_tokens)
    scores = torch.full(shape, math.nan, dtype=torch.float32, device=bench.device)
    before = {name: pool.clone() for name, pool in view.pools.items()}
    stage.keep(view, slot, length, length + dropped, scores)
    for name, pool in view.pools.items():
        assert same_bits(pool, before[name]), f"pool {name!r} is only read, and was written"
    return scores.cpu()


def grown(bench: AlgorithmBench, case: Case, slot: int, data: st.DataObject) -> None:
    """Make a request of at least two pages, the last tokens of which were decoded."""
    keeper(bench)
    least = min(2 * bench.group.page_tokens, case.most - 2)
    bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths(case.most - 2, least))])
    bench.append([slot], case.tokens(9)[:1])


class KeepTests(KitTests):
    """Scores of pages by ``keep``."""

    kind = "stage"

    @drawn(cpu=60, interpret=6, gpu=20, case=cases, seed=st.integers(1, 9))
    def test_every_page_has_a_score_of_its_own_request(
        self, subject: Subject, case: Case, data: Data, seed: int
    ) -> None:
        """Scores are finite, and other host pages and other requests change no bit of them."""
        bench = AlgorithmBench(subject, case)
        grown(bench, case, 1, data)
        dropped = data.draw(st.sampled_from([0, 7, 100_000]), "dropped")
        scores = worth(bench, 1, dropped)
        assert scores.isfinite().all(), f"scores {scores}"
        other = AlgorithmBench(subject, case, pages_seed=seed)
        for slot in (0, 2):
            other.prefill(slot, case.tokens(slot + 5))
        other.prefill(1, bench.keys[1][:-1])
        other.append([1], bench.keys[1][-1:])
        again = worth(other, 1, dropped)
        assert same_bits(scores, again), f"{scores}, on other pages {again}"

    @drawn(
        cpu=20,
        interpret=3,
        gpu=10,
        case=partial(cases, keys=("normal",), dtypes=("float32",), exact=False),
    )
    def test_pages_are_worth_what_the_formula_says(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """In fp32, for random keys, whatever had been given back before."""
        reported = stage_options_of(subject).worth
        if reported is None:
            pytest.skip(f"{subject.entry.name}: the options do not say what pages are worth")
        # Of two pages one is above the mean and one below, whatever they are worth.
        case = evolve(case, least_units=max(case.units, 4 * case.geometry.page_units))
        bench = AlgorithmBench(subject, case)
        keeper(bench)
        least = 3 * bench.group.page_tokens
        keys = exact_keys(subject, case.tokens(1))[: data.draw(bench.lengths(least=least))]
        bench.prefill(1, keys[:-1])
        bench.append([1], keys[-1:])
        dropped = data.draw(st.sampled_from([0, 7, 900]), "dropped")
        expected, error = reported(bench, 1, len(keys) + dropped)
        got = worth(bench, 1, dropped).double()
        apart = float((got - expected).abs().max())
        assert apart <= error, f"pages are worth {got}, by the formula {expected}"

    @drawn(cpu=30, interpret=6, gpu=20, needs=[require_both], case=rounded_cases)
    def test_kernels_score_pages_as_the_reference_does(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Equal up to rounding, relative to the largest score."""
        benches = [AlgorithmBench(subject, case, impl=impl) for impl in ("reference", "triton")]
        grown(benches[0], case, 1, data)
        benches[1].prefill(1, benches[0].keys[1][:-1])
        benches[1].append([1], benches[0].keys[1][-1:])
        dropped = data.draw(st.sampled_from([0, 7, 100_000]), "dropped")
        one, two = (worth(bench, 1, dropped) for bench in benches)
        eps = 16 * torch.finfo(case.geometry.dtype).eps
        size = 1 + one.abs().max()
        assert (one - two).abs().max() <= eps * size, f"reference {one}, kernels {two}"
