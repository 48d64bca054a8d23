"""The form of a selection, and that it follows the keys. Part of the algorithm suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve, fields_dict
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, sizes_of
from topkv_testing.algorithm.memory import UNWRITTEN, same_bits
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.strategies import batches


def assert_form(bench: AlgorithmBench, ids: Tensor, slots: Sequence[int]) -> None:
    """Assert that ids are written, unique, selectable, and as many as the budget allows."""
    attends = "attends" in bench.subject.entry.capabilities.traits
    for slot, row in zip(slots, ids.tolist(), strict=True):
        for lane in row:
            assert_lane(lane, bench.selectable(slot), attends)
        if slot < 0:
            assert all(set(lane) == {-1} for lane in row), f"a padded row selects {row}"


def assert_lane(lane: Sequence[int], limit: int, attends: bool) -> None:
    """Assert the form of one row of K ids, of which those below ``limit`` are selectable."""
    assert UNWRITTEN not in lane, f"ids {lane} are not written completely"
    valid = [i for i in lane if i != -1]
    assert len(set(valid)) == len(valid), f"ids {lane} repeat a unit"
    outside = [i for i in valid if not 0 <= i < limit]
    assert not outside, f"ids {lane}: {outside} are not below the {limit} selectable units"
    most = min(limit, len(lane))
    if attends:
        assert len(valid) == most, f"ids {lane}: {len(valid)} units, the budget has {most}"


class SelectionTests(KitTests):
    """The form of a selection and what it depends on, one request at a time."""

    kind = "algorithm"

    @drawn(cpu=100, interpret=6, gpu=20, case=cases)
    def test_ids_are_well_formed(self, subject: Subject, case: Case, data: Data) -> None:
        """Written, unique, selectable, K of them; in a ragged, padded batch, after decode too."""
        bench = AlgorithmBench(subject, case)
        for slot in range(bench.requests):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths())])
        rows = data.draw(batches(range(bench.requests), bench.requests))
        q = case.queries(len(rows))
        q[[row for row, slot in enumerate(rows) if slot < 0]] = torch.nan
        assert_form(bench, bench.retrieve(q, rows), rows)
        bench.append(rows, case.tokens(5)[: len(rows)])
        assert_form(bench, bench.retrieve(q, rows), rows)

    @drawn(cpu=60, interpret=2, gpu=20, case=cases)
    def test_length_edges(self, subject: Subject, case: Case) -> None:
        """One token, and each side of the edges of a unit, a page and the budget."""
        unit, page, k = case.geometry.unit, case.geometry.page_tokens, case.select
        ends = (unit, 2 * unit, k * unit, (k + 1) * unit, page, 2 * page, case.most)
        edges = sorted({1, *(end + by for end in ends for by in (-1, 0, 1))})
        edges = [edge for edge in edges if 1 <= edge <= case.most]
        bench = AlgorithmBench(subject, case, requests=len(edges))
        tokens, rows = case.tokens(0), list(range(len(edges)))
        for slot, edge in enumerate(edges):
            bench.prefill(slot, tokens[: max(edge - 1, 1)])
        # The last token comes by decode, where there is more than one.
        bench.append(
            [slot if edges[slot] > 1 else -1 for slot in rows],
            torch.stack([tokens[edge - 1] for edge in edges]),
        )
        ids = bench.retrieve(case.queries(1).expand(len(rows), -1, -1, -1), rows)
        assert_form(bench, ids, rows)

    @drawn(cpu=80, interpret=5, gpu=20, traits=["attends"], case=cases, exactly=st.booleans())
    def test_covering_budget_selects_all(
        self, subject: Subject, case: Case, data: Data, exactly: bool
    ) -> None:
        """A budget of at least the selectable units selects them all: dense attention."""
        bench = AlgorithmBench(subject, evolve(case, select=case.units))
        length = data.draw(bench.lengths())
        bench.prefill(0, case.tokens(0)[:length])
        if exactly:
            units = max(bench.selectable(0), min(sizes_of(subject).selects))
            bench = AlgorithmBench(subject, evolve(case, select=units))
            bench.prefill(0, case.tokens(0)[:length])
        for lane in lanes(bench.retrieve(case.queries(1), [0]))[0]:
            lacking = set(range(bench.selectable(0))) - set(lane)
            assert not lacking, f"K = {bench.group.select} leaves out {lacking} of all units"

    @drawn(cpu=80, interpret=4, gpu=20, case=cases)
    def test_promised_units_are_selected(self, subject: Subject, case: Case, data: Data) -> None:
        """Sinks, windows and the like, whatever the keys say."""
        forcing = {"sink_units", "recent_units"} & {*fields_dict(subject.entry.parameters)}
        if options_of(subject).promised is None and not forcing:
            pytest.skip(f"{subject.entry.name}: neither options nor parameters promise units")
        bench = AlgorithmBench(subject, case)
        for slot in range(bench.requests):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths())])
        rows = list(range(bench.requests))
        for slot, row in enumerate(lanes(bench.retrieve(case.queries(len(rows)), rows))):
            for lane in row:
                lacking = bench.promised(slot) - set(lane)
                assert not lacking, f"units {lacking} are promised, selected are {lane}"

    @drawn(cpu=80, interpret=3, gpu=20, traits=["nested"], case=cases)
    def test_budgets_are_nested(self, subject: Subject, case: Case, data: Data) -> None:
        """A larger budget selects all that a smaller one selects."""
        length = data.draw(AlgorithmBench(subject, case, requests=1).long_lengths())
        before: list[set[int]] | None = None
        for select in sorted({*sizes_of(subject).selects, case.select + 1}):
            bench = AlgorithmBench(subject, evolve(case, select=select), requests=1)
            bench.prefill(0, case.tokens(0)[:length])
            now = [set(lane) for lane in lanes(bench.retrieve(case.queries(1), [0]))[0]]
            for small, large in zip(before or [], now, strict=False):
                assert small <= large, f"K = {select} selects {large}, without {small - large}"
            before = now

    @drawn(
        cpu=60, interpret=4, gpu=20, traits=["low_ties"], case=partial(cases, keys=("constant",))
    )
    def test_ties_go_to_the_lower_unit(self, subject: Subject, case: Case, data: Data) -> None:
        """Equal keys: the lowest units, beside those that are promised."""
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, case.tokens(0)[: data.draw(bench.lengths())])
        promised = bench.promised(0)
        others = [unit for unit in range(bench.selectable(0)) if unit not in promised]
        expected = sorted([*promised, *others[: case.select - len(promised)]])
        for lane in lanes(bench.retrieve(case.queries(1), [0]))[0]:
            assert lane == expected, f"all units tie: selected are {lane}, not {expected}"

    @drawn(cpu=80, interpret=5, gpu=20, case=cases, zero=st.booleans())
    def test_massive_ties_still_fill_the_budget(
        self, subject: Subject, case: Case, data: Data, zero: bool
    ) -> None:
        """Keys that are all alike, or a query of zeros: valid ids, and as many as ever."""
        bench = AlgorithmBench(subject, evolve(case, keys=case.keys if zero else "constant"))
        bench.prefill(1, case.tokens(0)[: data.draw(bench.lengths())])
        q = case.queries(2) * (0 if zero else 1)
        assert_form(bench, bench.retrieve(q, [-1, 1]), [-1, 1])

    @drawn(cpu=60, interpret=3, gpu=20, case=partial(cases, exact=False))
    def test_same_input_gives_the_same_bits(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Twice in one instance, with other poison; and in a second one, as on another rank."""
        length, q = 0, case.queries(1)
        results: list[Tensor] = []
        for _ in range(2):
            bench = AlgorithmBench(subject, case)
            length = length or data.draw(bench.long_lengths())
            bench.prefill(0, case.tokens(0)[:length])
            results += [bench.retrieve(q, [0]), bench.retrieve(q, [0], poison=5)]
        same = all(same_bits(results[0], other) for other in results[1:])
        assert same, f"the same call selects {[lanes(ids)[0] for ids in results]}"

    @drawn(cpu=60, interpret=3, gpu=20, traits=["value_free"], case=cases)
    def test_values_never_matter(self, subject: Subject, case: Case, data: Data) -> None:
        """V changes no selection."""
        length, chosen = 0, list[Any]()
        for values in (0.5, -8.0):
            bench = AlgorithmBench(subject, case, requests=1, values=values)
            length = length or data.draw(bench.long_lengths())
            bench.prefill(0, case.tokens(0)[:length])
            bench.append([0], case.tokens(0)[length : length + 1])
            chosen.append(lanes(bench.retrieve(case.queries(1), [0])))
        assert chosen[0] == chosen[1], f"with other values: {chosen[1]}, before {chosen[0]}"

    @drawn(
        cpu=80,
        interpret=4,
        gpu=20,
        traits=["scale_free"],
        case=cases,
        exponent=st.sampled_from((-3, -1, 1, 3)),
    )
    def test_selection_ignores_the_size_of_queries(
        self, subject: Subject, case: Case, data: Data, exponent: int
    ) -> None:
        """A query times a power of two selects the same."""
        bench = AlgorithmBench(subject, case, requests=1)
        bench.prefill(0, case.tokens(0)[: data.draw(bench.long_lengths())])
        q = case.queries(1)
        one, two = (lanes(bench.retrieve(x, [0])) for x in (q, q * 2.0**exponent))
        assert one == two, f"q selects {one}, q * 2**{exponent} selects {two}"

    @drawn(cpu=60, interpret=4, gpu=20, case=cases)
    def test_strides_of_queries_do_not_matter(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Queries as a slice of a projection of queries, keys and values: NaN between the rows."""
        bench = AlgorithmBench(subject, case)
        for slot in range(2):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.long_lengths())])
        q = case.queries(2)
        wide = q.new_full((2, 1, q.shape[2] + 2, q.shape[3]), torch.nan).to(bench.device)
        wide[:, :, :-2] = q.to(bench.device)
        expected = lanes(bench.retrieve(q, [0, 1]))
        got = lanes(bench.retrieve(wide[:, :, :-2], [0, 1]))
        assert got == expected, f"strided queries select {got}, contiguous ones {expected}"
