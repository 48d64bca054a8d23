"""Units on the device count like all others, or get a bonus if that is on. Part of the suite.

``sticky`` is the parameter of algorithms that offer a bonus (``topkv_authoring.sticky``). With it
on, a selection follows from the history of its request and from the size of the buffer. So a fork,
a request that was rolled back and one that took another way to its length may select otherwise.
These tests look at what holds all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from attrs import evolve, fields_dict
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, rounded_cases
from topkv_testing.algorithm.kernels import assert_alike, captured, require_both
from topkv_testing.algorithm.memory import UNWRITTEN, same_bits
from topkv_testing.algorithm.selection import assert_form
from topkv_testing.host_reads import require_graph
from topkv_testing.kit import Data, KitTests, Subject, drawn

SOME, MOST = 0.37, 1e6
"""Bonuses: one that decides between neighbours, by which no two scores on the grid of exact data
differ, and one that decides everything."""


def with_bonus(case: Case, bonus: float) -> Case:
    """The case with another value of the parameter ``sticky``."""
    return evolve(case, params={**case.params, "sticky": bonus})


def require_sticky(subject: Subject) -> None:
    """Skip a test of algorithms that offer the bonus."""
    if "sticky" not in fields_dict(subject.entry.parameters):
        pytest.skip(f"{subject.entry.name} has no parameter 'sticky'")


def on_device(bench: AlgorithmBench, slot: int) -> list[set[int]]:
    """Selectable units of each lane of a request that are in buffer or ring."""
    group = bench.group
    newest = (bench.high(slot) - 1) // group.unit
    held = bench.layer.held.unflatten(0, (bench.requests, -1))[slot].tolist()
    units = range(bench.selectable(slot))
    ring = {unit for unit in units if unit > newest - group.ring_slots}
    return [ring | {unit for unit in units if lane[unit] >= 0} for lane in held]


def filled(
    subject: Subject, case: Case, sizes: Sequence[int], impl: str | None = None
) -> AlgorithmBench:
    """A bench with a request of each size by slot, each with other units on the device."""
    bench = AlgorithmBench(subject, case, impl=impl)
    for slot, size in enumerate(sizes):
        bench.prefill(slot, case.tokens(slot)[:size])
        bench.keep(slot, case.seed + slot)
    return bench


class StickyTests(KitTests):
    """Selections of algorithms that offer a bonus for units on the device, and of all others."""

    kind = "algorithm"

    @drawn(cpu=60, interpret=3, gpu=20, case=cases)
    def test_what_is_on_the_device_changes_nothing_unasked(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Ids stay, whatever buffer and ring hold, unless the parameter ``sticky`` is set."""
        if "sticky" in fields_dict(subject.entry.parameters):
            case = with_bonus(case, 0.0)
        bench = AlgorithmBench(subject, case)
        bench.prefill(1, case.tokens(1)[: data.draw(bench.long_lengths())])
        q = case.queries(1)
        before = bench.retrieve(q, [1])
        bench.keep(1, case.seed)
        after = bench.retrieve(q, [1])
        assert same_bits(after, before), f"selected are {after}, and before {before}"

    @drawn(
        cpu=60, interpret=4, gpu=20, needs=[require_sticky], case=partial(cases, keys=("normal",))
    )
    def test_a_bonus_draws_what_is_on_the_device(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Resident units that were selected stay, absent ones come only if they were selected.

        A bonus larger than all scores leaves room for absent units only where they are promised,
        or resident ones too few, if any unit can be selected (``attends``).
        """
        attends = "attends" in subject.entry.capabilities.traits
        sizes = [data.draw(AlgorithmBench(subject, case).long_lengths()) for _ in range(2)]
        benches = [filled(subject, with_bonus(case, by), sizes) for by in (0.0, SOME, MOST)]
        q, rows = case.queries(3), [1, -1, 0]
        found = [bench.retrieve(q, rows) for bench in benches]
        for bench, ids in zip(benches, found, strict=True):
            assert_form(bench, ids, rows)
        for row, slot in ((0, 1), (2, 0)):
            here, promised = on_device(benches[0], slot), benches[0].promised(slot)
            for lane, resident in enumerate(here):
                none, some, most = ({*lanes(ids)[row][lane]} for ids in found)
                lost, new = (none & resident) - some, (some - resident) - none
                assert not lost, f"a bonus for {resident} drops {lost} of {none}"
                assert not new, f"a bonus for {resident} adds {new} to {none}"
                assert promised <= most, f"{promised} are promised, selected are {most}"
                room = len(most) - len(promised - resident)
                assert not attends or len(most & resident) == min(len(resident), room), (
                    f"{resident} are worth more than all others, and selected are {most}"
                )

    @drawn(
        cpu=60,
        interpret=3,
        gpu=20,
        needs=[require_sticky],
        case=cases,
        bonus=st.sampled_from((SOME, MOST)),
    )
    def test_a_row_goes_by_its_own_buffer(
        self, subject: Subject, case: Case, data: Data, bonus: float
    ) -> None:
        """A ragged padded batch with a bonus selects what each row selects alone."""
        case = with_bonus(case, bonus)
        sizes = [data.draw(AlgorithmBench(subject, case).long_lengths()) for _ in range(2)]
        together, q = filled(subject, case, sizes), case.queries(3)
        rows = data.draw(st.permutations([0, 1, -1]))
        q[rows.index(-1)] = torch.nan
        ids = lanes(together.retrieve(q, rows))
        for slot, size in enumerate(sizes):
            alone, row = AlgorithmBench(subject, case), rows.index(slot)
            alone.prefill(slot, case.tokens(slot)[:size])
            alone.keep(slot, case.seed + slot)
            got = lanes(alone.retrieve(q[row : row + 1], [slot]))[0]
            assert got == ids[row], f"row {row} selects {ids[row]} in a batch, {got} alone"

    @drawn(cpu=40, interpret=4, gpu=20, needs=[require_sticky, require_both], case=rounded_cases)
    def test_kernels_draw_what_the_reference_draws(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """With a bonus, the same mass; also with decoded tokens and after a rollback."""
        case, q, results = with_bonus(case, SOME), case.queries(2), []
        unit = case.geometry.unit
        room = AlgorithmBench(subject, case).long_lengths(most=case.most - unit - 1)
        sizes = [data.draw(room) for _ in range(2)]
        benches = [filled(subject, case, sizes, impl) for impl in ("reference", "triton")]
        for bench in benches:
            bench.append([1, 0], case.tokens(9)[:2])
            bench.extend(0, case.tokens(8)[:unit])
            bench.rollback(0, sizes[0] + 1)
            results.append(lanes(bench.retrieve(q, [1, 0])))
        assert_alike(benches, [1, 0], q, results)

    @drawn(cpu=1, interpret=1, gpu=8, needs=[require_sticky, require_graph], case=cases)
    def test_a_graph_reads_the_buffer_of_its_replay(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A captured step with a bonus equals eager ones while buffer and lengths change."""
        case = with_bonus(case, SOME)
        most = AlgorithmBench(subject, case).long_lengths(most=case.most - 8)
        sizes = [data.draw(most) for _ in range(3)]
        eager, graphed = (filled(subject, case, sizes) for _ in range(2))
        replay, k, q, ids = captured(graphed, case)
        for step, salt in pairwise(range(20, 24)):
            new, queries = case.tokens(step)[:3], case.queries(3, salt=salt)
            rows = data.draw(st.permutations([0, 1, 2]))
            for bench in (eager, graphed):
                bench.keep(rows[0], step)
            eager.append(rows, new, settle=False)
            expected = eager.retrieve(queries, rows)
            k.copy_(graphed.stage(rows, new))
            q.copy_(queries)
            ids.fill_(UNWRITTEN)
            replay()
            got = ids.cpu().view(expected.shape)
            assert same_bits(got, expected), f"replayed {got}, eager {expected}"
