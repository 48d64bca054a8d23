"""Corrections of attention for units that were not attended. Part of the suites of algorithms
and stages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.plugins.contract import has_hook
from topkv.types import Selection
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, rounded_cases
from topkv_testing.algorithm.kernels import require_both
from topkv_testing.algorithm.memory import same_bits
from topkv_testing.host_reads import no_host_reads, require_graph, require_interpreted
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.models.oracle import attention


@frozen
class Attended:
    """Attention over the units of a selection and the open one, before it is corrected.

    Attributes:
        ids: int32 ``[N, K]``.
        out: ``[B, 1, H, Dv]`` in the dtype of q.
        lse: fp32 ``[B, 1, H]``.
    """

    ids: Tensor
    out: Tensor
    lse: Tensor

    def copy(self) -> Attended:
        return Attended(*(each.clone() for each in (self.ids, self.out, self.lse)))

    def row(self, bench: AlgorithmBench, row: int) -> Attended:
        """One row alone."""
        lanes = bench.group.lane_heads
        ids = self.ids[row * lanes : (row + 1) * lanes].clone()
        return Attended(ids, self.out[row : row + 1].clone(), self.lse[row : row + 1].clone())


def corrected(bench: AlgorithmBench, q: Tensor, rows: Sequence[int], before: Attended) -> Attended:
    """Call ``correct`` on a copy; assert that selection and queries are only read."""
    after, asked = before.copy(), q.clone()
    bench.correct(asked, rows, after.ids, after.out, after.lse)
    assert same_bits(after.ids, before.ids), "ids are only read, and were written"
    assert same_bits(asked, q), "queries are only read, and were written"
    return after


def attended(bench: AlgorithmBench, rows: Sequence[int], q: Tensor, ids: Tensor) -> Attended:
    """Attention in float64 over the selection; padded rows hold 0 and -inf."""
    group, model = bench.group, bench.model
    out = torch.zeros(len(rows), 1, model.num_heads, model.out_dim, dtype=model.dtype)
    lse = torch.full((len(rows), 1, model.num_heads), -torch.inf)
    for row, slot in enumerate(rows):
        if slot < 0:
            continue
        keys, closed = bench.keys[slot], bench.selectable(slot)
        unit_of = torch.arange(len(keys)) // group.unit
        for lane in range(group.lane_heads):
            chosen = [u for u in ids[row * group.lane_heads + lane].tolist() if 0 <= u < closed]
            seen = torch.isin(unit_of, torch.tensor([*chosen, closed]))
            heads = model.num_heads // group.lane_heads
            mine = slice(lane * heads, (lane + 1) * heads)
            kv = slice(lane * group.heads_per_lane, (lane + 1) * group.heads_per_lane)
            k = keys[seen][:, kv]
            part, total = attention(q[row, :, mine], k, k.flip(-1), model.scale)
            out[row, :, mine], lse[row, :, mine] = part.to(out.dtype), total.float()
    return Attended(ids.to(bench.device), out.to(bench.device), lse.to(bench.device))


def selections(bench: AlgorithmBench, rows: Sequence[int]) -> st.SearchStrategy[Tensor]:
    """Selections ``[N, K]`` of rows: closed units in any order, -1 between; often all of them."""
    width = bench.group.select

    def lane(slot: int) -> st.SearchStrategy[list[int]]:
        units = st.permutations(range(bench.selectable(slot)))
        most = st.just(width) | st.integers(0, width)
        kept = st.tuples(units, most).map(lambda drawn: drawn[0][: min(width, drawn[1])])
        return kept.flatmap(lambda found: st.permutations([*found, *[-1] * (width - len(found))]))

    every = [lane(slot) for slot in rows for _ in range(bench.group.lane_heads)]
    return st.tuples(*every).map(lambda drawn: torch.tensor(drawn, dtype=torch.int32))


def corrects(bench: AlgorithmBench) -> None:
    """Skip algorithms and stages that correct nothing."""
    if not has_hook(bench.algorithm, "correct"):
        pytest.skip(f"{bench.subject.entry.name} has no correct")


def filled(bench: AlgorithmBench, case: Case, data: st.DataObject) -> list[int]:
    """Prompts and a decoded token in two of the slots; the rows, one of them padded."""
    corrects(bench)
    rows: list[int] = data.draw(st.permutations([0, 2, -1]))
    few = bench.lengths(most=min(bench.group.select * bench.group.unit, case.most - 1))
    for slot in (0, 2):
        bench.prefill(slot, case.tokens(slot)[: data.draw(few | bench.long_lengths())])
    bench.append(rows, case.tokens(9)[: len(rows)])
    return rows


class CorrectTests(KitTests):
    """Corrections of attention, by a stage or by an algorithm itself."""

    kind = "algorithm"

    @drawn(cpu=60, interpret=6, gpu=20, case=cases)
    def test_a_correction_adds_what_is_left_out_and_nothing_else(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Rows of which all is attended, and padded ones, keep their bits; no mass is lost."""
        bench = AlgorithmBench(subject, case, values=None)
        rows = filled(bench, case, data)
        q = case.queries(len(rows))
        before = attended(bench, rows, q, data.draw(selections(bench, rows)))
        q[rows.index(-1)] = torch.nan
        after = corrected(bench, q, rows, before)
        lanes = bench.group.lane_heads
        assert after.out.isfinite().all(), f"{after.out} of {before.out}"
        for row, slot in enumerate(rows):
            own = before.ids[row * lanes : (row + 1) * lanes]
            left = ((own >= 0).sum(1) < bench.selectable(slot)).repeat_interleave(
                bench.model.num_heads // lanes
            )
            for name in ("out", "lse"):
                was, now = (getattr(each, name)[row, 0] for each in (before, after))
                assert same_bits(was[~left], now[~left]), (
                    f"row {row}: {name} of lanes without units that were left out changed "
                    f"from {was[~left]} to {now[~left]}"
                )
            now, was = after.lse[row, 0, left], before.lse[row, 0, left]
            assert (now >= was - 1e-5 * (1 + was.abs())).all(), f"lse fell: {was} to {now}"

    @drawn(cpu=40, interpret=4, gpu=20, case=cases, seed=st.integers(0, 99))
    def test_rows_are_corrected_alone(
        self, subject: Subject, case: Case, data: Data, seed: int
    ) -> None:
        """The correction of a row depends neither on the rows beside it nor on the order of its
        ids, up to the rounding of sums."""
        bench = AlgorithmBench(subject, case, values=None)
        rows = filled(bench, case, data)
        q = case.queries(len(rows))
        before = attended(bench, rows, q, data.draw(selections(bench, rows)))
        together = corrected(bench, q, rows, before)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(before.ids.shape[1], generator=generator)
        for row, slot in enumerate(rows):
            alone = before.row(bench, row)
            alone = Attended(alone.ids[:, order.to(bench.device)], alone.out, alone.lse)
            got = corrected(bench, q[row : row + 1], [slot], alone)
            expected = together.row(bench, row)
            what = f"row {row} alone becomes {got}, in a batch {expected}"
            eps = 4 * torch.finfo(got.out.dtype).eps
            torch.testing.assert_close(got.out, expected.out, rtol=eps, atol=eps, msg=what)
            torch.testing.assert_close(got.lse, expected.lse, rtol=1e-5, atol=1e-5, msg=what)

    @drawn(cpu=40, interpret=6, gpu=20, needs=[require_both], case=rounded_cases)
    def test_kernels_correct_as_the_reference_does(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Equal results, within the rounding of the output's dtype."""
        benches = [
            AlgorithmBench(subject, case, impl=impl, values=None)
            for impl in ("reference", "triton")
        ]
        corrects(benches[0])
        size = data.draw(benches[0].long_lengths())
        for bench in benches:
            bench.prefill(1, case.tokens(1)[:size])
            bench.append([1], case.tokens(9)[:1])
        q = case.queries(1)
        before = attended(benches[0], [1], q, data.draw(selections(benches[0], [1])))
        one, two = (corrected(bench, q, [1], before) for bench in benches)
        eps = torch.finfo(case.geometry.dtype).eps
        size_of = 1 + one.out.double().abs().max()
        assert (one.out.double() - two.out.double()).abs().max() <= 8 * eps * size_of, (
            f"the reference gives {one.out}, the kernels {two.out}"
        )
        torch.testing.assert_close(one.lse, two.lse, rtol=1e-4, atol=4 * eps)

    @drawn(cpu=1, interpret=2, needs=[require_interpreted], case=cases)
    def test_a_correction_reads_nothing_on_the_host(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """No ``item()``, ``tolist()`` or ``nonzero()``."""
        bench = AlgorithmBench(subject, case, values=None)
        rows = filled(bench, case, data)
        q = case.queries(len(rows))
        now = attended(bench, rows, q, data.draw(selections(bench, rows)))
        with no_host_reads():
            bench.algorithm.correct(
                bench.layer, q.to(bench.device), Selection(now.ids), now.out, now.lse
            )

    @drawn(cpu=1, interpret=1, gpu=8, needs=[require_graph], case=cases)
    def test_a_correction_replays_from_a_graph(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """No host sync, and a replay equals the eager call."""
        bench = AlgorithmBench(subject, case, values=None)
        rows = filled(bench, case, data)
        q = case.queries(len(rows)).to(bench.device)
        before = attended(bench, rows, q.cpu(), data.draw(selections(bench, rows)))
        expected, now = corrected(bench, q, rows, before), before.copy()
        bench.correct(q, rows, now.ids, now.out, now.lse)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bench.algorithm.correct(bench.layer, q, Selection(now.ids), now.out, now.lse)
        now.out.copy_(before.out)
        now.lse.copy_(before.lse)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(now.out, expected.out), f"{now.out}, eager {expected.out}"
        assert same_bits(now.lse, expected.lse), f"{now.lse}, eager {expected.lse}"
