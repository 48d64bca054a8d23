"""``adapt_page_table`` against its formula, and followed by ``attend``."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv_testing.backend.attend import check_attend
from topkv_testing.backend.bench import plain_geometries
from topkv_testing.backend.plans import AdaptCase, adapt_cases
from topkv_testing.kit import KitTests, Subject, drawn, examples
from topkv_testing.strategies import Geometry


def check_table(subject: Subject, case: AdaptCase) -> None:
    """Adapt on a fresh instance and compare with the formula."""
    backend, _, group = case.backend(subject)
    case.check(*case.run(backend, group, subject.tier.device))


def token_geometry(subject: Subject) -> Geometry:
    """A geometry of unit 1; skips where the entry does not state that unit."""
    for geometry in plain_geometries(subject):
        if geometry.unit == 1:
            return geometry
    pytest.skip(f"{subject.entry.name} does not state unit 1")


def _competing(subject: Subject) -> st.SearchStrategy[AdaptCase]:
    return adapt_cases(subject, tail=False, geometry=token_geometry(subject))


class TableTests(KitTests):
    """``adapt_page_table`` of a backend."""

    kind = "backend"

    @drawn(cpu=100, interpret=50, case=adapt_cases)
    def test_table_follows_the_formula(self, subject: Subject, case: AdaptCase) -> None:
        """The tail stands at ``count``, in its ring slot; rows are head-major in each slot."""
        check_table(subject, case)

    @drawn(cpu=50, interpret=20, case=_competing)
    def test_table_of_an_algorithm_whose_tail_competes(
        self, subject: Subject, case: AdaptCase
    ) -> None:
        """K columns, unit 1: nothing is appended."""
        check_table(subject, case)

    def test_padded_rows_have_no_tokens(self, subject: Subject) -> None:
        """Rows with slot -1, first, between, last and alone, whatever the plan says of them."""
        for geometry in plain_geometries(subject):
            for rows in (
                ((-1, 0), (3, 21)),
                ((2, 5), (-1, 0), (0, 40)),
                ((7, 16), (-1, 0)),
                ((-1, 0), (-1, 0)),
            ):
                counts = (3,) * (len(rows) * geometry.lane_heads)
                check_table(subject, AdaptCase(geometry, rows, counts, 4, 6, 2))

    def test_wide_tables(self, subject: Subject) -> None:
        geometry = plain_geometries(subject)[0]
        for select in (1, 1023, 1024, 4096):
            rows = ((3, 10), (-1, 0), (0, 10), (1, 7))
            lanes = range(len(rows) * geometry.lane_heads)
            counts = tuple((select, select // 2, 0)[lane % 3] for lane in lanes)
            check_table(subject, AdaptCase(geometry, rows, counts, select, select + 1, 2))

    def test_serves_plan_after_plan_of_any_batch(self, subject: Subject) -> None:
        """One instance, made for four rows, with another plan in every call."""
        for geometry in plain_geometries(subject):
            case = AdaptCase(geometry, (), (), 4, 6, 2)
            backend, _, group = case.backend(subject, max_batch=4)
            for seed, batch in enumerate((3, 3, 1, 4, 2)):
                rows = [((seed + row) % 8, 5 + 9 * row + seed) for row in range(batch)]
                counts = [(seed + n) % 5 for n in range(batch * geometry.lane_heads)]
                case = evolve(case, requests=tuple(rows), counts=tuple(counts), seed=seed)
                case.check(*case.run(backend, group, subject.tier.device))

    def test_adapted_table_attends_to_selection_and_tail(self, subject: Subject) -> None:
        """Adapt, then attend over a buffer that is NaN wherever no lane may look."""

        @examples(subject.tier, cpu=40, interpret=10)
        @given(adapt_cases(subject, most_select=4, requests=(4,), longest=600, kv_heads=(1, 2, 3)))
        def check(case: AdaptCase) -> None:
            self._adapt_and_attend(subject, case)

        check()
        for geometry in plain_geometries(subject):
            lanes = 3 * geometry.lane_heads
            rows = ((2, 3 * geometry.unit + geometry.unit // 2), (-1, 0), (1, 1))
            counts = tuple((2 * lane) % 4 for lane in range(lanes))
            self._adapt_and_attend(subject, AdaptCase(geometry, rows, counts, 3, 4, 2, 3))

    def _adapt_and_attend(self, subject: Subject, case: AdaptCase) -> None:
        backend, model, group = case.backend(subject)
        table, lengths = case.run(backend, group, subject.tier.device)
        own = sum(size for lane in case.lanes() for _, size in lane)
        slots = case.max_requests * case.geometry.lane_heads * (case.buffer + case.ring)
        assert bool(((table >= 0) & (table < slots)).all()), "the table holds no valid addresses"
        assert int(lengths.sum()) == own, f"lengths sum to {int(lengths.sum())}, expected {own}"
        inputs = evolve(case.attend_inputs(), table=table.cpu(), lengths=lengths.cpu())
        assert torch.equal(inputs.lengths, torch.tensor([len(w) for w, _ in inputs.tokens]))
        check_attend(subject, backend, model.scale, inputs)
