"""Rows, slots, heads and host pages do not see each other. Part of the algorithm suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.differences import difference
from topkv_testing.kit import Data, KitTests, Subject, drawn


class BatchTests(KitTests):
    """Several requests in one batch."""

    kind = "algorithm"

    @drawn(cpu=60, interpret=3, gpu=20, case=cases)
    def test_rows_do_not_see_each_other(self, subject: Subject, case: Case, data: Data) -> None:
        """A ragged padded batch selects what each row selects alone, all else being NaN."""
        together = AlgorithmBench(subject, case)
        sizes = [data.draw(together.long_lengths()) for _ in range(2)]
        first, second = data.draw(st.permutations(range(together.requests)))[:2]
        rows = data.draw(st.permutations([first, second, -1]))
        q, new = case.queries(3), case.tokens(9)[:3]
        for slot, size in zip((first, second), sizes, strict=True):
            together.prefill(slot, case.tokens(slot)[:size])
        together.append(rows, new)
        q[rows.index(-1)] = torch.nan
        ids = lanes(together.retrieve(q, rows))
        for slot, size in zip((first, second), sizes, strict=True):
            alone, row = AlgorithmBench(subject, case), rows.index(slot)
            alone.prefill(slot, case.tokens(slot)[:size])
            alone.append([slot], new[row : row + 1])
            got = lanes(alone.retrieve(q[row : row + 1], [slot]))[0]
            assert got == ids[row], f"row {row} selects {ids[row]} in a batch, {got} alone"

    @drawn(cpu=60, interpret=3, gpu=20, case=cases)
    def test_slots_and_host_pages_do_not_matter(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Other slots, other host pages, another order of rows: the same selection."""
        here = AlgorithmBench(subject, case)
        there = AlgorithmBench(subject, case, pages_seed=1)
        moved = data.draw(st.permutations(range(here.requests)))
        for slot in range(here.requests):
            keys = case.tokens(slot)[: data.draw(here.long_lengths())]
            here.prefill(slot, keys)
            there.prefill(moved[slot], keys)
        q, rows = case.queries(here.requests), list(range(here.requests))
        new = case.tokens(9)[: here.requests]
        here.append(rows, new)
        there.append(moved[::-1], new.flip(0))
        ids = lanes(here.retrieve(q, rows))
        got = lanes(there.retrieve(q.flip(0), moved[::-1]))[::-1]
        assert got == ids, f"selected are {ids}, and {got} in slots {moved} on other pages"

    @drawn(
        cpu=80,
        interpret=4,
        gpu=20,
        traits=["head_equivariant"],
        case=partial(cases, kv_heads=(3, 2)),
    )
    def test_heads_are_alike(self, subject: Subject, case: Case, data: Data) -> None:
        """Permuted kv-heads, with their query heads, select the same, permuted."""
        scopes = subject.entry.capabilities.scopes
        if scopes is not None and "kv_head" not in scopes:
            pytest.skip(f"{subject.entry.name}: no scope in which kv-heads select for themselves")
        g = case.geometry
        order = data.draw(st.permutations(range(g.kv_heads)))
        here, there = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
        there._prompt = _permuted(there._prompt, order)
        keys = case.tokens(0)[: data.draw(here.long_lengths())]
        here.prefill(0, keys)
        there.prefill(0, keys[:, order] if keys.shape[1] > 1 else keys)
        q = case.queries(1)
        ids = lanes(here.retrieve(q, [0]))[0]
        lane_order = order if g.scope == "kv_head" else [0]
        expected = [ids[lane] for lane in lane_order]
        got = lanes(there.retrieve(_permuted(q[:, 0], order)[:, None], [0]))[0]
        assert got == expected, f"heads {order} select {got}, expected {expected}"

    @drawn(cpu=60, interpret=3, gpu=20, case=partial(cases, kv_heads=(3, 2)))
    def test_heads_do_not_see_each_other(self, subject: Subject, case: Case, data: Data) -> None:
        """A lane selects the same beside other heads, unless ``spec`` says that it uses all of
        them; if it uses none, other keys and queries change nothing at all."""
        here, there = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
        heads, lane_heads = here.spec.heads, here.group.lane_heads
        if heads == "all" or (heads == "own" and lane_heads == 1):
            return
        own = data.draw(st.integers(0, lane_heads - 1))
        kept = (torch.arange(case.geometry.kv_heads) == own) & (heads == "own")
        length, q = data.draw(here.long_lengths()), case.queries(1)
        keys, others = case.tokens(0)[:length], case.tokens(7)[:length]
        there._prompt = _beside(here._prompt, case.queries(case.most, 61)[:, 0], kept)
        here.prefill(0, keys)
        there.prefill(0, _beside(keys, others, kept))
        new = case.tokens(9)[:1]
        here.append([0], new)
        there.append([0], _beside(new, case.tokens(8)[:1], kept))
        expected = lanes(here.retrieve(q, [0]))[0][own]
        asked = _beside(q, case.queries(1, 60), kept)
        got = lanes(there.retrieve(asked, [0]))[0][own]
        reported = f"spec() says heads={heads!r}, and beside others"
        assert got == expected, f"{reported} lane {own} selects {got}, not {expected}"

    @drawn(cpu=80, interpret=5, gpu=20, case=cases)
    def test_rows_that_append_nothing_write_nothing(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Idle rows and padded rows leave every pool as it is, but for host page 0."""
        bench = AlgorithmBench(subject, case)
        for slot in range(bench.requests):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths())])
        before = bench.snapshot()
        idle = data.draw(st.integers(0, bench.requests - 1))
        bench.idle([idle, -1, -1], torch.full_like(case.tokens(9)[:3], torch.nan))
        _assert_unchanged(bench, before, [])
        bench.append([-1, idle, -1], case.tokens(9)[:3])
        _assert_unchanged(bench, before, [idle])

    @drawn(cpu=60, interpret=5, gpu=20, case=cases)
    def test_requests_write_to_their_own_units(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A prompt and decoded tokens change representations of their own units alone."""
        bench = AlgorithmBench(subject, case)
        before = bench.snapshot()
        slot = data.draw(st.integers(0, bench.requests - 1))
        bench.prefill(slot, case.tokens(slot)[: data.draw(bench.lengths())])
        bench.append([slot], case.tokens(9)[:1])
        _assert_unchanged(bench, before, [slot])


def _permuted(q: Tensor, order: Sequence[int]) -> Tensor:
    """Queries ``[m, H, D]`` with the groups of heads in another order."""
    permuted: Tensor = q.unflatten(1, (len(order), -1))[:, order].flatten(1, 2)
    return permuted


def _beside(rows: Tensor, others: Tensor, kept: Tensor) -> Tensor:
    """Return ``rows [..., heads, D]`` with those of ``others`` for all kv-heads that are not kept;
    keys of an index, which all heads share, are those of ``others`` if no head is kept."""
    if rows.shape[-2] < len(kept):
        return rows if kept.any() else others
    mine = kept.repeat_interleave(rows.shape[-2] // len(kept))
    return torch.where(mine[:, None], rows, others)


def _assert_unchanged(
    bench: AlgorithmBench, before: dict[str, Tensor], writers: Sequence[int]
) -> None:
    """Assert that ``writers`` changed no rows of the pools but those of their own units."""
    unit, grains = bench.group.unit, bench.spec.representations
    table, pools = bench.page_table.cpu().long(), bench.snapshot()
    for spec in grains:
        now, then = pools[spec.name], before[spec.name]
        mine = torch.zeros(len(now), dtype=torch.bool)
        if spec.grain == "request":
            mine[writers] = True
        else:
            per_page = len(now) // bench.num_pages
            mine[:per_page] = True  # host page 0 belongs to nobody
            for slot in writers:
                tokens = -(-len(bench.keys[slot]) // unit) * unit
                count = bench.rows(spec.name, tokens, full=False)
                own = table[slot][:, None] * per_page + torch.arange(per_page)
                mine[own.flatten()[:count]] = True
        now[mine] = then[mine]
        text = difference(now, then)
        if text:
            raise AssertionError(
                f"pool {spec.name!r} of grain {spec.grain} {text}; rows of pages of no "
                "writer must stay"
            )
