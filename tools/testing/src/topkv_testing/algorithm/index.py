"""Tests of algorithms for models with an indexer of their own. Part of the algorithm suite."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.selection import assert_lane
from topkv_testing.differences import require_same
from topkv_testing.kit import Data, KitTests, Subject, drawn

CHECKED = 8
"""Most rows of a prompt that are compared with decode steps."""


def require_index(subject: Subject) -> None:
    """Skip a test that is about indexers."""
    if not subject.entry.capabilities.needs_index:
        pytest.skip(f"{subject.entry.name} does not select by a model's own indexer")


def require_weights(subject: Subject) -> None:
    """Skip a test that is about weights of index heads, which latent attention has alone."""
    if "mla" not in subject.entry.capabilities.attention:
        pytest.skip(f"{subject.entry.name} selects by an index without weights")


def prompt_bench(subject: Subject, case: Case, requests: int) -> AlgorithmBench:
    """A bench of an algorithm that selects for the rows of a prompt; skips others."""
    bench = AlgorithmBench(subject, case, requests=requests)
    if not hasattr(bench.algorithm, "retrieve_prompt"):
        pytest.skip(f"{subject.entry.name} has no retrieve_prompt")
    return bench


def prompt_ids(bench: AlgorithmBench, keys: Tensor, cuts: list[int]) -> dict[int, list[list[int]]]:
    """Ids of each lane, by row of a prompt that slot 0 reads in chunks; without the chunks for
    which the core does not ask."""
    rows: dict[int, list[list[int]]] = {}
    for start, end in pairwise(sorted({0, len(keys), *cuts})):
        ids = bench.prompt(0, keys[start:end])
        if ids is not None:
            rows.update(zip(range(start, end), ids.tolist(), strict=True))
    return rows


class IndexTests(KitTests):
    """Weights of either sign, and selections for the rows of a prompt."""

    kind = "algorithm"

    @drawn(
        cpu=80,
        interpret=4,
        gpu=20,
        traits=["attends"],
        needs=[require_index, require_weights],
        case=cases,
    )
    def test_each_weight_is_that_of_its_head(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A positive weight draws tokens, a negative one turns them away: below those of no score.

        Heads of weight -2 look one way, those of weight 1 the other.
        """
        bench, g = AlgorithmBench(subject, case, requests=1), case.geometry
        tokens = st.integers(0, case.most - 1)
        drawing = data.draw(tokens)
        # Others fill the budget.
        most = max(case.most - case.select - 1, 0)
        away = sorted(data.draw(st.sets(tokens, max_size=most)) - {drawing})
        toward = torch.randint(0, 2, (g.dim,), generator=case.generator(7)).float() * 2 - 1
        keys = torch.zeros(case.most, 1, g.dim)
        keys[away], keys[drawing] = 4 * toward, -4 * toward
        sides = 1 - 2 * (torch.arange(g.group) % 2)
        q = (sides[:, None] * toward)[None, None].to(g.dtype)
        weights = torch.where(sides > 0, -2.0, 1.0)[None, None]
        bench.prefill(0, keys.to(g.dtype))
        (lane,) = lanes(bench.retrieve(case.weigh(q, weights), [0]))[0]
        wrong = set(lane) & set(away) - bench.promised(0)
        assert not wrong, f"{wrong} of {lane} score below zero, and others score zero"
        if g.group > 1 and len(bench.promised(0) | {drawing}) <= case.select:
            assert drawing in lane, f"{drawing} alone scores above zero, selected are {lane}"

    @drawn(cpu=80, interpret=3, gpu=20, needs=[require_index], case=cases)
    def test_prompt_rows_select_what_decode_steps_select(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Each row, in any chunk, selects as a step at its length that sees no later token."""
        bench = prompt_bench(subject, case, requests=2)
        length = data.draw(bench.long_lengths() | bench.lengths(least=2))
        cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=3))
        keys, unit, k = case.tokens(0)[:length], case.geometry.unit, bench.width
        k *= unit
        ids = prompt_ids(bench, keys, cuts)
        drawn = st.sets(st.integers(0, length - 1), max_size=CHECKED - 3)
        at = sorted({*data.draw(drawn), k - 1, k, length - 1} & ids.keys())
        assume(at)
        steps = AlgorithmBench(subject, case, requests=len(at))
        for slot, row in enumerate(at):
            steps.prefill(slot, keys[: max(row, 1)])
        slots = list(range(len(at)))
        steps.append([slot if at[slot] else -1 for slot in slots], keys[at])
        expected = lanes(steps.retrieve(bench._prompt[at][:, None], slots))
        for row, by_lane in zip(at, expected, strict=True):
            got = [sorted(i for i in lane if i >= 0) for lane in ids[row]]
            # Of a step the core adds the unit that it is in.
            own = [row // unit] if bench.width > case.select else []
            assert got == [[*lane, *own] for lane in by_lane], (
                f"row {row} of a prompt in chunks that end at {cuts} selects {got}, a decode "
                f"step at length {row + 1} selects {by_lane}"
            )

    @drawn(cpu=80, interpret=4, gpu=20, needs=[require_index], case=cases, alike=st.booleans())
    def test_prompt_ids_are_well_formed(
        self, subject: Subject, case: Case, data: Data, alike: bool
    ) -> None:
        """Written, unique, no later token, K of them or all; also from keys and weights alike."""
        attends = "attends" in subject.entry.capabilities.traits
        case = evolve(case, keys="constant") if alike else case
        bench = prompt_bench(subject, case, requests=2)
        length = data.draw(bench.lengths(least=2))
        cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=3))
        ids = prompt_ids(bench, case.tokens(0)[:length], cuts)
        for row, by_lane in ids.items():
            for lane in by_lane:
                assert_lane(lane, row // case.geometry.unit + 1, attends)

    @drawn(cpu=40, interpret=2, gpu=20, needs=[require_index], case=cases)
    def test_a_prompt_between_two_steps_changes_neither(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Selecting for a prompt writes no representation, and no other request's step sees it."""
        bench = prompt_bench(subject, case, requests=3)
        for slot in (1, 2):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.long_lengths())])
        q = case.queries(2)
        before = lanes(bench.retrieve(q, [2, 1]))
        length = data.draw(bench.long_lengths())
        bench.prompt(0, case.tokens(0)[:length])
        after = lanes(bench.retrieve(q, [2, 1]))
        assert after == before, f"selected are {after}, before the prompt {before}"
        alone = AlgorithmBench(subject, case, requests=3)
        alone.prefill(0, case.tokens(0)[:length])
        what = "selecting for a prompt wrote other representations than its construction"
        require_same(bench.stored(0), alone.stored(0), what)
