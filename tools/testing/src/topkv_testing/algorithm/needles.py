"""A key that matches the query is found, wherever it is. Part of the algorithm suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import Data, KitTests, Subject, drawn


def plant(case: Case, units: Sequence[int], hidden: bool, offset: int) -> tuple[Tensor, Tensor]:
    """Keys with one needle for each lane, and the query that looks for it.

    Args:
        case: shape and seed.
        units: unit of the needle of each lane.
        hidden: the other keys of that unit point away from the query, more than elsewhere.
        offset: token of the needle in its unit.

    Returns:
        keys ``[most, Hkv, D]`` and q ``[1, 1, H, D]``, of equal weights. All heads look in one
        direction, so that a head which reads another head's keys finds the other head's needle.
        Heads that share the keys of an index look each at channels of its own.
    """
    g, generator = case.geometry, case.generator(7)
    toward = torch.randint(0, 2, (g.dim,), generator=generator).float() * 2 - 1
    away = 1 + torch.randint(0, 4, (case.most, case.key_heads, 1), generator=generator) / 4
    keys = -away * toward
    lane_of_head = torch.arange(g.kv_heads) * len(units) // g.kv_heads
    if case.key_heads < g.kv_heads:
        lanes = (torch.arange(g.dim) % len(units))[None]
        q = torch.where(lane_of_head.repeat_interleave(g.group)[:, None] == lanes, toward, 0.0)
    else:
        lanes = lane_of_head[:, None]
        q = toward * 2.0 ** torch.randint(0, 2, (g.kv_heads * g.group, 1), generator=generator)
    for size, tokens in ((-8, range(g.unit) if hidden else ()), (4, (offset,))):
        for lane, unit in enumerate(units):
            for token in tokens:
                at = unit * g.unit + token
                keys[at] = torch.where(lanes == lane, size * toward, keys[at])
    return keys.to(g.dtype), case.weigh(q[None, None].to(g.dtype))


def opposed(case: Case, units: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Keys and a query whose heads, by turns, look in opposite directions, one needle each.

    Args:
        case: shape, at least two query heads a lane.
        units: unit of the needle of even and of odd query heads.
    """
    g = case.geometry
    toward = torch.randint(0, 2, (g.dim,), generator=case.generator(7)).float() * 2 - 1
    keys = torch.zeros(case.most, case.key_heads, g.dim)
    for sign, unit in zip((1, -1), units, strict=True):
        keys[unit * g.unit] = 4 * sign * toward
    signs = 1 - 2 * (torch.arange(g.kv_heads * g.group) % 2)
    return keys.to(g.dtype), case.weigh((signs[:, None] * toward)[None, None].to(g.dtype))


class NeedleTests(KitTests):
    """A key that matches the query far better than every other one is found, wherever it is."""

    kind = "algorithm"

    @drawn(cpu=120, interpret=8, gpu=20, traits=["attends"], case=cases)
    def test_needle_in_a_prompt(self, subject: Subject, case: Case, data: Data) -> None:
        """Each lane finds its own needle, not that of another head."""
        hidden = options_of(subject).hidden_needles
        bench = AlgorithmBench(subject, case)
        units = bench.group.lane_heads
        last = case.most - 1 if subject.entry.capabilities.tail == "selectable" else case.units - 2
        where = data.draw(st.lists(st.integers(0, last), min_size=units, max_size=units))
        offset = data.draw(st.integers(0, case.geometry.unit - 1))
        keys, q = plant(case, where, hidden, offset)
        bench.prefill(1, keys)
        for unit, lane in zip(where, lanes(bench.retrieve(q, [1]))[0], strict=True):
            assume(len(bench.promised(1) | {unit}) <= case.select)
            assert unit in lane, f"the needle is in unit {unit}, selected are {lane}"

    @drawn(cpu=80, interpret=5, gpu=20, traits=["attends"], case=partial(cases, groups=(2, 4)))
    def test_every_query_head_finds_its_needle(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Query heads of one lane that look in opposite directions, and a budget for both."""
        if not options_of(subject).head_needles:
            pytest.skip(f"{subject.entry.name}: the options do not set head_needles")
        if subject.entry.capabilities.max_group == 1:
            pytest.skip(f"{subject.entry.name} takes one query head per kv-head")
        bench = AlgorithmBench(subject, case, requests=1)
        assume(case.geometry.group > 1)
        pairs = st.tuples(*[st.integers(0, case.units - 2)] * 2).filter(lambda p: p[0] != p[1])
        where = data.draw(pairs)
        keys, q = opposed(case, where)
        bench.prefill(0, keys)
        assume(len(bench.promised(0) | set(where)) <= case.select)
        for lane in lanes(bench.retrieve(q, [0]))[0]:
            assert set(where) <= set(lane), f"needles are in {where}, selected are {lane}"

    @drawn(
        cpu=80,
        interpret=4,
        gpu=20,
        traits=["attends", "incremental"],
        case=partial(cases, units=(1, 2, 4)),
    )
    def test_unit_is_found_as_soon_as_decode_closes_it(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A needle among decoded tokens, from the step on in which its unit may be selected."""
        hidden = options_of(subject).hidden_needles
        bench = AlgorithmBench(subject, case, requests=1)
        unit, lane_heads = case.geometry.unit, bench.group.lane_heads
        needle = data.draw(st.integers(0, case.units - 3))
        offset = data.draw(st.integers(0, unit - 1))
        keys, q = plant(case, [needle] * lane_heads, hidden, offset)
        # The prompt ends before the needle, in its unit or in the one before it.
        least = max(1, needle * unit - unit)
        start = data.draw(st.integers(least, max(least, needle * unit + offset)))
        bench.prefill(0, keys[:start])
        while len(bench.keys[0]) < (needle + 2) * unit + 1:
            bench.append([0], keys[len(bench.keys[0])][None])
            newly = bench.selectable(0) > needle and (len(bench.keys[0]) - 1) % unit == 0
            if newly and len(bench.promised(0) | {needle}) <= case.select:
                for lane in lanes(bench.retrieve(q, [0]))[0]:
                    assert needle in lane, (
                        f"unit {needle} holds the needle and is selectable at length "
                        f"{len(bench.keys[0])}, selected are {lane}"
                    )
