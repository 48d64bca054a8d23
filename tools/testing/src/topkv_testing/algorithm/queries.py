"""Rows of several queries. Part of the algorithm suite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, rounded_cases
from topkv_testing.algorithm.correct import attended, corrects, selections
from topkv_testing.algorithm.kernels import measured
from topkv_testing.algorithm.memory import same_bits
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import Data, KitTests, Subject, drawn

MOST = 4
"""Queries of a row in these tests."""

SLOTS = (2, 0)


def require_several(subject: Subject) -> int:
    """Return the most queries of a row; skip algorithms that take one."""
    stated = subject.entry.capabilities.queries
    if stated == 1:
        pytest.skip(f"{subject.entry.name} selects for one query a row")
    return min(stated or MOST, MOST)


def counts_of(case: Case, most: int) -> st.SearchStrategy[list[int]]:
    """Tokens that each row appends: no more than two units that the ring has."""
    unit = case.geometry.unit
    return st.lists(
        st.integers(1, most if unit == 1 else min(most, unit + 1)),
        min_size=len(SLOTS),
        max_size=len(SLOTS),
    )


def filled(bench: AlgorithmBench, case: Case, sizes: Sequence[int]) -> AlgorithmBench:
    """The bench with prompts in its slots."""
    for slot, size in zip(SLOTS, sizes, strict=True):
        bench.prefill(slot, case.tokens(slot)[:size])
    return bench


class QueriesTests(KitTests):
    """Rows that append and ask for several tokens at once."""

    kind = "algorithm"

    @drawn(cpu=40, interpret=6, gpu=20, case=cases)
    def test_several_tokens_are_kept_as_one_by_one(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Pools hold the same bits whether tokens come in one step or each in its own."""
        most = require_several(subject)
        benches = [AlgorithmBench(subject, case, max_queries=most) for _ in range(2)]
        longest = case.most - most
        sizes = [data.draw(benches[0].lengths(longest)) for _ in SLOTS]
        counts, keys = data.draw(counts_of(case, most)), case.tokens(9)[: 2 * most]
        keys = keys.unflatten(0, (2, most))
        once, each = (filled(bench, case, sizes) for bench in benches)
        once.append_several(SLOTS, keys, counts)
        for row, slot in enumerate(SLOTS):
            for key in keys[row, : counts[row]]:
                each.append([slot], key[None], settle=False)  # as in one step
        for name, pool in once.pools.items():
            assert same_bits(pool, each.pools[name]), (
                f"rows that append {counts} tokens to {sizes} leave other bits in the pool "
                f"{name!r} than tokens that come one by one"
            )

    @drawn(cpu=40, interpret=6, gpu=20, case=rounded_cases)
    def test_equal_queries_select_what_one_selects(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Queries that are alike select as one of them does of the units before all; those that
        are padding have no influence."""
        most = require_several(subject)
        several = AlgorithmBench(subject, case, max_queries=most)
        one = AlgorithmBench(subject, case)
        sizes = [data.draw(one.long_lengths(case.most - most)) for _ in SLOTS]
        counts, keys = data.draw(counts_of(case, most)), case.tokens(9)[: 2 * most]
        keys, q = keys.unflatten(0, (2, most)), case.queries(2)
        filled(several, case, sizes).append_several(SLOTS, keys, counts)
        filled(one, case, sizes)
        if subject.entry.capabilities.tail == "forced":  # else its token would compete
            one.append(SLOTS, keys[:, 0])
        repeated = q.expand(-1, most, -1, -1).clone()
        for row, count in enumerate(counts):
            repeated[row, count:] = torch.nan
        found = lanes(several.retrieve(repeated, SLOTS, appended=counts))
        expected = lanes(one.retrieve(q, SLOTS))
        for row, slot in enumerate(SLOTS):
            masses = [measured(one, slot, q[row], x[row]) for x in (expected, found)]
            assert (masses[0] - masses[1]).abs().max() <= options_of(subject).mass, (
                f"{counts[row]} equal queries select {found[row]}, one {expected[row]}"
            )

    @drawn(cpu=40, interpret=4, gpu=20, case=partial(cases, dtypes=("float32",), exact=False))
    def test_queries_are_corrected_as_one_by_one(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Each query of a row is corrected as it is alone, and padding keeps its bits."""
        most = require_several(subject)
        several = AlgorithmBench(subject, case, max_queries=most, values=None)
        one = AlgorithmBench(subject, case, values=None)
        corrects(several)
        sizes = [data.draw(one.lengths(case.most - most)) for _ in SLOTS]
        counts, keys = data.draw(counts_of(case, most)), case.tokens(9)[: 2 * most]
        keys = keys.unflatten(0, (2, most))
        filled(several, case, sizes).append_several(SLOTS, keys, counts)
        filled(one, case, sizes).append(SLOTS, keys[:, 0])
        q = torch.cat([case.queries(2, salt) for salt in range(20, 20 + most)], 1)
        ids = data.draw(selections(one, SLOTS))
        alone = [attended(one, SLOTS, q[:, n : n + 1], ids) for n in range(most)]
        out, lse = (torch.cat([getattr(x, n) for x in alone], 1) for n in ("out", "lse"))
        for row, count in enumerate(counts):
            q[row, count:], out[row, count:], lse[row, count:] = math.nan, 0, -math.inf
        several.correct(q, SLOTS, alone[0].ids, out, lse, counts)
        for nth, each in enumerate(alone):
            one.correct(q[:, nth : nth + 1], SLOTS, each.ids, each.out, each.lse)
            for row, count in enumerate(counts):
                if nth >= count:
                    assert not out[row, nth].any(), "the output of padding changed"
                    assert lse[row, nth].isneginf().all(), "the lse of padding changed"
                    continue
                torch.testing.assert_close(out[row, nth], each.out[row, 0], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(lse[row, nth], each.lse[row, 0], rtol=1e-4, atol=1e-5)

    @drawn(
        cpu=40,
        interpret=6,
        gpu=20,
        traits=["attends"],
        case=partial(cases, keys=("normal",), exact=False),
    )
    def test_all_queries_of_a_row_count(self, subject: Subject, case: Case, data: Data) -> None:
        """Each of several queries finds the token that it alone looks for."""
        most = require_several(subject)
        bench = AlgorithmBench(subject, case, max_queries=most)
        size = case.most - most
        if bench.group.select < most + 4 or size // bench.group.unit <= bench.group.select + 1:
            return  # forced units may take all places, or everything is selected
        keys = case.tokens(2)[:size]
        places = data.draw(
            st.lists(
                st.integers(0, size // bench.group.unit - 2),
                min_size=2,
                max_size=2,
                unique=True,
            )
        )
        q, _ = case.asked(case.queries(2).transpose(0, 1))  # two queries of one row
        if case.index:  # one key has to suit all heads
            q = q[:, :, :1].expand_as(q).contiguous()
        dim = case.geometry.dim
        for nth, unit in enumerate(places):
            wanted = q[0, nth].unflatten(0, (case.key_heads, -1)).float().mean(1)
            wanted = 30 * dim**0.5 * wanted / wanted.norm(dim=-1, keepdim=True).clamp(min=0.1)
            keys[unit * bench.group.unit] = wanted.to(keys.dtype)
        bench.prefill(2, keys)
        new = case.tokens(9)[:2][None]
        counts = [min(2, bench.group.unit + 1)]
        bench.append_several([2], new, counts)
        (found,) = lanes(bench.retrieve(case.weigh(q), [2], appended=counts))
        for lane in found:
            assert set(places) <= set(lane), f"units {places} are sought, {lane} selected"
