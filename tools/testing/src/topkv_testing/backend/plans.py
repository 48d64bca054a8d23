"""Inputs of ``adapt_page_table``, and its spec in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.types import GroupShape, LayerView, Plan, StepTensors, Tables
from topkv_testing.backend.bench import (
    SENTINEL,
    assert_unchanged,
    backend_geometries,
    make_backend,
    result,
)
from topkv_testing.backend.cases import AttendInputs
from topkv_testing.kit import Subject
from topkv_testing.strategies import INT32, Geometry, seeds

Lane = list[tuple[int, int]]
"""Units that a lane attends: ``(global slot, tokens of the unit)`` in table order."""


def _ints(values: Sequence[Any], device: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@define(eq=False)
class StepInputs:
    """A step and a plan on the device, with everything else of a ``LayerView`` poisoned."""

    view: LayerView
    plan: Plan

    @classmethod
    def empty(cls, group: GroupShape, batch: int, device: Any) -> StepInputs:
        """Tensors of the right shapes at the addresses where they stay."""
        lanes, requests = batch * group.lane_heads, group.max_requests

        def ints(*shape: int) -> Tensor:
            return torch.full(shape, SENTINEL, dtype=torch.int32, device=device)

        step = StepTensors(
            *(ints(batch), ints(batch), ints(batch)),
            *(ints(batch), ints(batch)),
            ints(1, 1).expand(requests, 4),
        )
        # Every bit set is NaN in all formats of numbers, e4m3 bytes included.
        poison = torch.full((group.dtype.itemsize,), 255, dtype=torch.uint8, device=device)
        ring = poison.view(group.dtype).expand(
            requests,
            *(group.lane_heads, group.ring_slots, group.heads_per_lane),
            *(group.unit, group.head_dim),
        )
        wide = [ints(lanes, group.select) for _ in range(3)]
        plan = Plan(wide[0], ints(lanes), wide[1], wide[2], ints(lanes))
        return cls(LayerView(0, 0, group, step, ring, ring), plan)


@frozen
class AdaptCase:
    """One call of ``adapt_page_table`` in a few numbers.

    Attributes:
        geometry: of the group.
        requests: ``(slot, length)`` of each row; ``(-1, 0)`` where it is padded.
        counts: selected units of each lane.
        select, buffer, ring: K, C, T.
        max_requests: request slots.
        tail: units of the newest tokens are appended: the table has more than K columns.
        seed: of the slots that are selected.
        queries: of each row; one each where empty.
        most: queries Q that the table has columns for.
    """

    geometry: Geometry
    requests: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    select: int
    buffer: int
    ring: int
    max_requests: int = 8
    tail: bool = True
    seed: int = 0
    queries: tuple[int, ...] = ()
    most: int = 1

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def width(self) -> int:
        """Columns of the table."""
        return self.select + (1 - (1 - self.most) // self.geometry.unit if self.tail else 0)

    def backend(self, subject: Subject, max_batch: int | None = None) -> tuple[Any, Any, Any]:
        """Instance, model and group."""
        return make_backend(
            *(subject, self.geometry, max_batch or self.batch),
            requests=self.max_requests,
            select=self.select,
            buffer=self.buffer,
            ring=self.ring,
            max_queries=self.most,
        )

    def slots(self) -> list[list[int]]:
        """Distinct slot ids of each lane, LRU buffer and ring alike."""
        random = torch.Generator().manual_seed(self.seed)
        lanes = []
        for lane, count in enumerate(self.counts):
            order = torch.randperm(self.buffer + self.ring, generator=random).tolist()
            tails = [slot for slot, _ in self._tails(lane // self.geometry.lane_heads)]
            lanes.append([slot for slot in order if slot not in tails][:count])
        return lanes

    def _tails(self, row: int) -> Lane:
        """Ring slots of the units that the newest tokens of a row are in, with their tokens."""
        length, unit = self.requests[row][1], self.geometry.unit
        queries = self.queries[row] if self.queries else 1
        units = range(max(length - queries, 0) // unit, -(-length // unit) if self.tail else 0)
        return [(self.buffer + u % self.ring, min(unit, length - u * unit)) for u in units]

    def lanes(self) -> list[Lane]:
        """Units that each lane attends, as the hook spec has it."""
        g, lanes = self.geometry, []
        for lane, slots in enumerate(self.slots()):
            slot, length = self.requests[lane // g.lane_heads]
            row = slot * g.lane_heads + lane % g.lane_heads
            start = row * (self.buffer + self.ring)
            listed = [(start + each, g.unit) for each in slots]
            tails = self._tails(lane // g.lane_heads)
            listed += [(start + each, tokens) for each, tokens in tails]
            lanes.append(listed if slot >= 0 and length > 0 else [])
        return lanes

    def fill(self, inputs: StepInputs) -> None:
        """Write step and plan; behind ``count`` the plan holds trash, which no formula reads."""
        step, plan = inputs.view.step, inputs.plan
        device = plan.count.device
        step.slots.copy_(_ints([slot for slot, _ in self.requests], device))
        step.lengths.copy_(_ints([length for _, length in self.requests], device))
        step.high.copy_(step.lengths)
        counts = self.queries or (1,) * self.batch
        pairs = zip(counts, self.requests, strict=True)
        step.appended.copy_(_ints([count * (slot >= 0) for count, (slot, _) in pairs], device))
        trash = [-1, *INT32, 0, self.buffer]
        rows = [
            [*slots, *(trash[(lane + i) % 5] for i in range(self.select - len(slots)))]
            for lane, slots in enumerate(self.slots())
        ]
        plan.slots.copy_(_ints(rows, device))
        plan.count.copy_(_ints(self.counts, device))

    def run(self, backend: Any, group: GroupShape, device: Any) -> tuple[Tensor, Tensor]:
        """Adapt between guards and return table and lengths, on the device."""
        inputs = StepInputs.empty(group, self.batch, device)
        self.fill(inputs)
        plan, step = inputs.plan, inputs.view.step
        table = result((len(self.counts), self.width), torch.int32, device)
        lengths = result((len(self.counts),), torch.int32, device)
        queries = _ints(self.queries, device) if self.queries else None
        tables = Tables(table.body, lengths.body, queries=queries)
        owned = {
            "plan.slots": plan.slots,
            "plan.count": plan.count,
            "step.slots": step.slots,
            "step.lengths": step.lengths,
            "plan.miss_slots": plan.miss_slots,
        }
        if queries is not None:
            owned["tables.queries"] = queries
        assert_unchanged(lambda: backend.adapt_page_table(inputs.view, plan, tables), owned)
        table.assert_intact("table")
        lengths.assert_intact("lengths")
        return table.body, lengths.body

    def check(self, table: Tensor, lengths: Tensor) -> None:
        """Compare with the formula, entry by entry."""
        width, lanes = self.width, self.lanes()
        want = [[slot for slot, _ in lane] for lane in lanes]
        got = table.tolist()
        for lane, (mine, theirs) in enumerate(zip(want, got, strict=True)):
            used = theirs[: len(mine)]
            assert used == mine, f"table of lane {lane}: expected {mine}, got {used}"
            behind = theirs[len(mine) :]
            assert behind == [0] * (width - len(mine)), (
                f"lane {lane}: columns behind the last used one must be 0, got {behind}"
            )
        sizes = [sum(tokens for _, tokens in lane) for lane in lanes]
        assert lengths.tolist() == sizes, f"lengths: expected {sizes}, got {lengths.tolist()}"

    def attend_inputs(self) -> AttendInputs:
        """A device buffer in which only what the lanes attend is not NaN, and queries."""
        g = self.geometry
        random = torch.Generator().manual_seed(self.seed)
        heads = g.kv_heads // g.lane_heads
        slots = self.max_requests * g.lane_heads * (self.buffer + self.ring)
        pool = torch.full((slots, heads, 2, g.unit, g.dim), torch.nan, dtype=g.dtype)
        tokens = []
        for lane in self.lanes():
            pairs = [(slot, place) for slot, size in lane for place in range(size)]
            where, place = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
            values = torch.randn(len(pairs), heads, 2, g.dim, generator=random)
            pool[where, :, :, place] = values.to(g.dtype)
            tokens.append((where, place))
        q = 2 * torch.randn(len(tokens), 1, heads * g.group, g.dim, generator=random)
        nothing = torch.zeros(0, dtype=torch.int32)
        return AttendInputs(
            q.to(g.dtype), [pool], "buffer", nothing, nothing, tokens, g.lane_heads
        )


@st.composite
def adapt_cases(
    draw: st.DrawFn,
    subject: Subject,
    *,
    tail: bool = True,
    most_select: int = 40,
    requests: Sequence[int] = (8, 50, 0),
    longest: int = 5000,
    geometry: Geometry | None = None,
    kv_heads: Sequence[int] = (1, 2, 3, 8),
) -> AdaptCase:
    """Cases with padded rows anywhere. ``requests`` 0 stands for as many as int32 ids allow."""
    g = geometry or draw(backend_geometries(subject, kv_heads=kv_heads))
    select, ring = draw(st.integers(1, most_select)), draw(st.integers(1, 4))
    buffer = select + draw(st.integers(0, 5))
    rows = draw(st.sampled_from(requests)) or (2**31 - 1) // (g.lane_heads * (buffer + ring))
    slot = st.one_of(st.integers(0, rows - 1), st.sampled_from((0, rows - 1)))
    edge = st.sampled_from((1, g.unit, g.unit + 1, g.unit * (ring + 1)))
    row = st.tuples(slot, st.one_of(edge, st.integers(1, longest)))
    batch = draw(
        st.lists(
            st.one_of(row, row, st.just((-1, 0))),
            min_size=1,
            max_size=4,
            unique_by=lambda each: each[0] if each[0] >= 0 else object(),
        )
    )
    lanes = len(batch) * g.lane_heads
    count = st.one_of(st.sampled_from((0, select)), st.integers(0, select))
    counts = draw(st.lists(count, min_size=lanes, max_size=lanes))
    return AdaptCase(
        g, tuple(batch), tuple(counts), select, buffer, ring, rows, tail, draw(seeds())
    )
