"""Candidates that ``refine`` leaves. Part of the stage suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.memory import UNWRITTEN, same_bits
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.stage.oracles import assert_left, exact_keys, stage_options_of
from topkv_testing.strategies import seeds

TURNS = 4
"""Calls on one bench, each with other candidates and other queries."""


def candidates(bench: AlgorithmBench, rows: Sequence[int]) -> st.SearchStrategy[Tensor]:
    """Candidates ``[N, K']`` of rows: any of the selectable units in any order, -1 between."""
    width = bench.algorithm.group.select

    @st.composite
    def draw_lane(draw: Any, slot: int) -> list[int]:
        units = draw(st.permutations(range(bench.selectable(slot))))
        kept = units[: draw(st.integers(0, min(width, len(units))))]
        lane: list[int] = draw(st.permutations([*kept, *[-1] * (width - len(kept))]))
        return lane

    every = [draw_lane(slot) for slot in rows for _ in range(bench.group.lane_heads)]
    return st.tuples(*every).map(lambda drawn: torch.tensor(drawn, dtype=torch.int32))


def refine(
    bench: AlgorithmBench, q: Tensor, rows: Sequence[int], offered: Tensor
) -> list[list[int]]:
    """Refine these candidates; return the ids of each lane as they were written."""
    bench.algorithm.algorithm.next_ids = offered.to(bench.device)
    left = bench.retrieve(q, rows).flatten(0, 1)
    (given,) = (link.candidates.ids[: len(offered)].cpu() for link in bench.algorithm.links)
    assert same_bits(given, offered), f"candidates {offered} are only read, and now are {given}"
    bench.algorithm.algorithm.next_ids = None
    found: list[list[int]] = left.tolist()
    return found


def filled(bench: AlgorithmBench, case: Case, data: st.DataObject) -> None:
    """Append prompts in every slot; skip stages that refine nothing."""
    if bench.algorithm.links[0].candidates is None:
        pytest.skip(f"{bench.subject.entry.name} has no refine")
    for slot in range(bench.requests):
        bench.prefill(slot, case.tokens(slot)[: data.draw(bench.long_lengths())])


def _require_left(subject: Subject) -> None:
    if stage_options_of(subject).left is None:
        pytest.skip(f"{subject.entry.name}: the options do not say what is left")


class RefineTests(KitTests):
    """Candidates that ``refine`` leaves."""

    kind = "stage"

    @drawn(cpu=80, interpret=6, gpu=20, case=cases)
    def test_what_is_left_are_candidates(self, subject: Subject, case: Case, data: Data) -> None:
        """Every element is written, with a candidate of its own lane, each once, or -1."""
        bench = AlgorithmBench(subject, case)
        filled(bench, case, data)
        rows = data.draw(st.permutations([*range(bench.requests), -1]))[: bench.requests]
        q = case.queries(len(rows))
        q[[row for row, slot in enumerate(rows) if slot < 0]] = torch.nan
        offered = data.draw(candidates(bench, rows))
        found = refine(bench, q, rows, offered)
        for lane, among in zip(found, offered.tolist(), strict=True):
            assert UNWRITTEN not in lane, f"ids {lane} are not written completely"
            valid = [unit for unit in lane if unit != -1]
            assert len(set(valid)) == len(valid), f"ids {lane} repeat a unit"
            alien = set(valid) - set(among)
            assert not alien, f"ids {lane}: {alien} are not among the candidates {among}"

    @drawn(cpu=60, interpret=4, gpu=20, case=cases, seed=st.integers(0, 99))
    def test_the_order_of_candidates_does_not_matter(
        self, subject: Subject, case: Case, data: Data, seed: int
    ) -> None:
        """Candidates at other places of their row leave the same units."""
        bench = AlgorithmBench(subject, case)
        filled(bench, case, data)
        rows = list(range(bench.requests))
        q, offered = case.queries(len(rows)), data.draw(candidates(bench, rows))
        order = torch.randperm(offered.shape[1], generator=torch.Generator().manual_seed(seed))
        one, two = (
            [sorted(lane) for lane in refine(bench, q, rows, each)]
            for each in (offered, offered[:, order])
        )
        assert one == two, f"{offered} leave {one}, in the order {order.tolist()} {two}"

    @drawn(cpu=80, interpret=4, gpu=20, case=cases)
    def test_the_best_candidates_are_left(self, subject: Subject, case: Case, data: Data) -> None:
        """Exact scores: K candidates of the largest, by the author's formula; ties either way."""
        oracle = options_of(subject).oracle
        if oracle is None:
            pytest.skip(f"{subject.entry.name}: the options have no oracle")
        bench = AlgorithmBench(subject, case)
        filled(bench, case, data)
        rows = list(range(bench.requests))
        bench.append(rows, case.tokens(9)[: len(rows)], settle=False)
        q, offered = case.queries(len(rows)), data.draw(candidates(bench, rows))
        found = refine(bench, q, rows, offered)
        heads = bench.group.lane_heads
        for number, (lane, among) in enumerate(zip(found, offered.tolist(), strict=True)):
            row, head = divmod(number, heads)
            worth = oracle(bench, rows[row], q[row])[head]
            best = sorted((float(worth[unit]) for unit in among if unit >= 0), reverse=True)
            best = best[: bench.group.select]
            got = sorted((float(worth[unit]) for unit in lane if unit >= 0), reverse=True)
            assert got == best, f"left are {lane} of worth {got}, the best are worth {best}"

    @drawn(
        cpu=80,
        interpret=2,
        gpu=20,
        needs=[_require_left],
        case=partial(cases, keys=("normal", "ties"), dtypes=("float32",), exact=False),
        seed=seeds(),
    )
    def test_what_is_left_is_what_the_formula_leaves(
        self, subject: Subject, case: Case, data: Data, seed: int
    ) -> None:
        """As many as the formula leaves, of the highest ranks; in fp32, in ragged batches."""
        bench = AlgorithmBench(subject, case)
        for slot in range(bench.requests):
            _filled(bench, case, slot, data.draw(bench.long_lengths()))
        _compare(bench, case, seed)

    @drawn(
        cpu=30,
        interpret=1,
        gpu=10,
        needs=[_require_left],
        case=partial(cases, keys=("constant",), dtypes=("float32",)),
        seed=seeds(),
    )
    def test_of_equal_candidates_the_lowest_are_left(
        self, subject: Subject, case: Case, data: Data, seed: int
    ) -> None:
        """Keys that are all alike: as many as the formula leaves, from the lowest unit on."""
        bench = AlgorithmBench(subject, case)
        for slot in range(bench.requests):
            _filled(bench, case, slot, data.draw(bench.long_lengths()))
        for each in _refined(bench, case, seed):
            lowest = each.among[: len(each.kept)]
            assert each.kept == lowest, f"all of {each.among} are alike, left are {each.kept}"

    @drawn(
        cpu=10,
        interpret=1,
        gpu=3,
        needs=[_require_left],
        case=partial(cases, dtypes=("float32",), units=(4, 1), exact=False),
        seed=seeds(),
    )
    def test_long_requests_leave_what_the_formula_leaves(
        self, subject: Subject, case: Case, seed: int
    ) -> None:
        """A request of ``long_units``, of which a quarter is left at most."""
        units = options_of(subject).long_units
        case = evolve(case, least_units=units, select=units // 4)
        bench = AlgorithmBench(subject, case, requests=1)
        _filled(bench, case, 0, case.most)
        _compare(bench, case, seed)


def _filled(bench: AlgorithmBench, case: Case, slot: int, length: int) -> None:
    """Make a request whose last token was decoded."""
    keys = exact_keys(bench.subject, case.tokens(slot))[:length]
    bench.prefill(slot, keys[:-1])
    bench.append([slot], keys[-1:])


@frozen
class Refined:
    """The candidates of a lane that are left.

    Attributes:
        slot, lane: the request, and one of its lanes.
        q: ``[1, H, D]``.
        among, kept: the candidates and what is left of them, in ascending order.
    """

    slot: int
    lane: int
    q: Tensor
    among: list[int]
    kept: list[int]


def _refined(bench: AlgorithmBench, case: Case, seed: int) -> Iterator[Refined]:
    """Refine random candidates with random queries, for all requests, several times."""
    generator, rows = torch.Generator().manual_seed(seed), list(range(bench.requests))
    lanes, width = bench.group.lane_heads, bench.algorithm.group.select
    for turn in range(TURNS):
        q = case.queries(len(rows), salt=50 + turn)
        offered = torch.full((len(rows) * lanes, width), -1, dtype=torch.int32)
        for lane, places in enumerate(offered):
            units = torch.randperm(bench.selectable(lane // lanes), generator=generator)[:width]
            # One lane in four has fewer candidates, at any places.
            count = len(units) if lane % 4 else 1 + seed % len(units)
            places[torch.randperm(width, generator=generator)[:count]] = units[:count].int()
        found = refine(bench, q, rows, offered)
        for number, each in enumerate(zip(offered.tolist(), found, strict=True)):
            slot, lane = divmod(number, lanes)
            among, kept = (sorted(unit for unit in units if unit >= 0) for units in each)
            yield Refined(slot, lane, q[slot], among, kept)


def _compare(bench: AlgorithmBench, case: Case, seed: int) -> None:
    options = stage_options_of(bench.subject)
    assert options.left is not None  # callers have asked
    for each in _refined(bench, case, seed):
        reported = options.left(bench, each.slot, each.q, each.lane, each.among)
        assert_left(reported, each.among, each.kept, options.near)
