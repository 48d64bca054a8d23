"""``attend`` of several queries a row against float64 attention over explicit tokens."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import assume
from hypothesis import strategies as st

from topkv.errors import CapabilityError
from topkv_testing.backend.attend import check_attend
from topkv_testing.backend.bench import make_backend
from topkv_testing.backend.cases import AttendCase, AttendInputs, attend_cases
from topkv_testing.backend.plans import AdaptCase, adapt_cases
from topkv_testing.kit import Data, KitTests, Subject, drawn


def with_queries(inputs: AttendInputs, counts: list[int], most: int) -> AttendInputs:
    """The inputs with ``most`` queries a row, of which ``counts`` are no padding (NaN)."""
    lanes, _, heads, dim = inputs.q.shape
    random = torch.Generator().manual_seed(most)
    q = 2 * torch.randn(lanes, most, heads, dim, generator=random)
    for lane in range(lanes):
        q[lane, counts[lane // inputs.lane_heads] :] = torch.nan
    queries = torch.tensor(counts, dtype=torch.int32)
    return evolve(inputs, q=q.to(inputs.q.dtype), queries=queries)


def most_queries(subject: Subject) -> int:
    """Most queries of a row, up to 5; skips backends that take one."""
    stated = subject.entry.capabilities.queries
    if stated == 1:
        pytest.skip(f"{subject.entry.name} attends with one query a row")
    return min(stated or 5, 5)


def _counts(subject: Subject) -> st.SearchStrategy[int]:
    return st.integers(2, most_queries(subject))


def _adapted(subject: Subject) -> st.SearchStrategy[AdaptCase]:
    return adapt_cases(subject, most_select=4, requests=(4,), longest=600, kv_heads=(1, 2))


class CausalTests(KitTests):
    """Rows of several queries, whose newest tokens are seen causally."""

    kind = "backend"

    @drawn(cpu=60, interpret=12, case=attend_cases, most=_counts)
    def test_each_query_sees_what_stands_before_it(
        self, subject: Subject, case: AttendCase, most: int, data: Data
    ) -> None:
        """Queries of a row see all tokens of its list but those of the queries behind them."""
        try:
            backend, model, _ = make_backend(subject, case.geometry, case.batch, max_queries=most)
        except CapabilityError:
            assume(False)
        counts = data.draw(
            st.lists(st.integers(1, most), min_size=case.batch, max_size=case.batch)
        )
        inputs = with_queries(case.make(), counts, most)
        check_attend(subject, backend, model.scale, inputs)

    @drawn(cpu=60, interpret=10, case=_adapted, most=_counts)
    def test_table_ends_with_the_units_of_all_queries(
        self, subject: Subject, case: AdaptCase, most: int, data: Data
    ) -> None:
        """Units of a row's newest tokens stand behind its selection, in order, however many they
        are; ``attend`` over that table shows each query what stands before it."""
        reached = 1 - (1 - most) // case.geometry.unit
        longest = [max(1, min(most, length)) for _, length in case.requests]
        counts = tuple(data.draw(st.integers(1, each)) for each in longest)
        case = evolve(case, most=most, queries=counts, ring=max(case.ring, reached))
        try:
            backend, model, group = case.backend(subject)
        except CapabilityError:
            assume(False)
        table, lengths = case.run(backend, group, subject.tier.device)
        case.check(table, lengths)
        found = evolve(case.attend_inputs(), table=table.cpu(), lengths=lengths.cpu())
        inputs = with_queries(found, list(counts), most)
        check_attend(subject, backend, model.scale, inputs)
