"""One group of many lanes under fuzz: the draws of the fuzzer, and the model beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define

from topkv.types import GroupShape
from topkv_testing.models.oracle import LaneModel
from topkv_testing.strategies import INT32
from topkv_testing.transfer.bench import Make, Row, TransferBench


class FastLane(LaneModel):
    """``LaneModel`` with a dict for the units, so that a step costs microseconds."""

    slot_of: dict[int, int]

    def reset(self) -> None:
        super().reset()
        self.slot_of = {}

    def hold(self, units: Sequence[int]) -> None:
        """Put unit u into slot u of an empty buffer."""
        for unit in units:
            self.unit_in[unit], self.slot_of[unit] = unit, unit

    def select(
        self, ids: Sequence[int], limit: int, low: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        slot_of = self.slot_of
        units = [unit for unit in dict.fromkeys(ids) if 0 <= unit < limit]
        hits = {slot_of[unit] for unit in units if unit < low and unit in slot_of}
        missed = [unit for unit in units if unit < low and unit not in slot_of]
        stale = [slot for slot in self.order if slot not in hits]
        kept = [slot for slot in self.order if slot in hits]
        victims = stale[: len(missed)]
        for unit, slot in zip(missed, victims, strict=True):
            evicted = self.unit_in[slot]
            if evicted is not None:
                del slot_of[evicted]
            self.unit_in[slot], slot_of[unit] = unit, slot
        self.order = stale[len(missed) :] + victims + kept
        return units, list(zip(missed, victims, strict=True))


class Violation(AssertionError):
    """The engine and the model disagree."""


@define
class Slot:
    """The fuzzer's state of a request.

    Attributes:
        length: tokens, all of which the ring has seen.
        resident: the lane was restored with its buffer filled.
        how: kind of its selections: 0 sliding, 1 jumping, 2 wild.
        overlap: share of a selection that stays in the next one.
        ids: the last selection, ``[layers, lane_heads, K]``.
        start: where the sliding window stands.
    """

    length: int
    resident: bool
    how: int
    overlap: float
    ids: np.ndarray
    start: int = 0


class FuzzedGroup:
    """One group under fuzz, everything drawn from one seed.

    Args:
        make: factory of the engine.
        group: its shape.
        device, impl: where and with which implementation it runs.
        seed: of everything.
    """

    def __init__(
        self, make: Make, group: GroupShape, device: torch.device, impl: str, seed: int
    ) -> None:
        self.group, self.device = group, device
        self.rng = np.random.default_rng(seed)
        self.bench = TransferBench(make, group, device, impl, seed=seed)
        self.lanes = {
            (layer, row): FastLane(group.buffer_slots)
            for layer in range(len(group.layers))
            for row in range(group.max_lanes)
        }
        layers = len(group.layers)
        self.order = np.tile(np.arange(group.buffer_slots), (layers, group.max_lanes, 1))
        self.held = np.full((layers, group.max_lanes, group.buffer_slots), -1)
        self.inverse = np.full((layers, group.max_lanes, group.max_units), -1)
        # Bytes of every entry, [pages, layers, lane heads, units of a page, bytes].
        entries = self.bench.store.entries.cpu().contiguous()
        self.truth = entries.flatten(4).view(torch.uint8).numpy().copy()
        self.slots = [self._begin(slot) for slot in range(group.max_requests)]

    def _begin(self, slot: int) -> Slot:
        """Give a slot a new owner, whose tokens are all on the host already."""
        group, rng = self.group, self.rng
        short = (group.buffer_slots + 1) * group.unit
        most = group.max_units * group.unit
        length = int(rng.integers(1, (short if rng.random() < 0.4 else most) + 1))
        resident = bool(rng.random() < 0.5)
        state = Slot(
            length,
            resident,
            how=int(rng.integers(3)),
            overlap=float(rng.choice([0.0, 0.5, 0.85, 1.0])),
            ids=rng.integers(
                0, group.max_units, (len(group.layers), group.lane_heads, group.select)
            ),
        )
        if resident or rng.random() < 0.2:
            self.bench.engine.restore(slot, length, resident)
        else:
            self.bench.engine.reset(slot)
        newest = (length - 1) // group.unit
        fits = resident and newest <= group.buffer_slots
        lanes = self.bench.store.lanes_of(slot)
        for layer in range(len(group.layers)):
            for row in range(lanes.start, lanes.stop):
                lane = self.lanes[layer, row]
                lane.reset()
                if fits:
                    lane.hold(range(min(-(-length // group.unit), group.buffer_slots)))
                self._note(layer, row, lane)
        return state

    def _note(self, layer: int, row: int, lane: FastLane) -> None:
        self.order[layer, row] = lane.order
        self.held[layer, row] = [-1 if unit is None else unit for unit in lane.unit_in]
        self.inverse[layer, row] = -1
        for unit, slot in lane.slot_of.items():
            self.inverse[layer, row, unit] = slot

    def _fits(self, state: Slot) -> bool:
        return state.resident and (state.length - 1) // self.group.unit <= self.group.buffer_slots

    def _grow(self, slot: int) -> None:
        """Now and then end or grow a request; a lane that fits grows past its buffer only."""
        state, group, rng = self.slots[slot], self.group, self.rng
        if rng.random() < 0.01:
            self.slots[slot] = self._begin(slot)
        elif rng.random() < 0.1:
            most = group.max_units * group.unit
            least = (group.buffer_slots + 1) * group.unit + 1 if self._fits(state) else 0
            longer = max(state.length + int(rng.integers(1, 2 * group.unit + 2)), least)
            state.length = longer if longer <= most else state.length

    def _ids(self, state: Slot, layer: int) -> np.ndarray:
        """Draw ids ``[lane_heads, K]``, of which a share is as in the step before."""
        group, rng = self.group, self.rng
        old, closed = state.ids[layer], max(1, (state.length - 1) // group.unit)
        if state.how == 0:
            step = group.select - round(group.select * state.overlap)
            state.start += step * (layer == 0)
            row = (state.start + np.arange(group.select)) % closed
            return np.broadcast_to(row, old.shape)
        fresh = rng.integers(0, closed, old.shape)
        if state.how == 2:
            wild = rng.choice([-1, -2, closed, closed + 1, group.max_units, *INT32], old.shape)
            fresh = np.where(rng.random(old.shape) < 0.3, wild, fresh)
        ids: np.ndarray = np.where(rng.random(old.shape) < state.overlap, old, fresh)
        return ids

    def call(self) -> int:
        """Plan and load a random batch in one layer; return its steps.

        Raises:
            Violation: the engine and the model disagree.
        """
        group, rng = self.group, self.rng
        layer = int(rng.integers(len(group.layers)))
        batch = rng.permutation(group.max_requests)
        batch = np.where(rng.random(len(batch)) < 0.06, -1, batch).tolist()
        rows, wanted = [], []
        for slot in batch:
            if slot < 0:
                rows.append(Row())
                wanted.append(rng.integers(0, 4, (group.lane_heads, group.select)))
                continue
            self._grow(slot)
            state = self.slots[slot]
            state.ids[layer] = self._ids(state, layer)
            wanted.append(state.ids[layer])
            rows.append(Row(slot, state.length, state.length, False, state.resident))
        self.bench.put(rows)
        ids = np.concatenate(wanted)
        plan = self.bench.run(layer, ids.tolist())
        self._check(layer, rows, ids.tolist(), plan)
        return len(ids)

    def _check(self, layer: int, rows: list[Row], ids: list[list[int]], plan: Any) -> None:
        loaded: list[tuple[int, int, int, int, int]] = []
        per_page, heads = self.group.units_per_page, self.group.lane_heads
        actual = zip(*plan.values(), strict=True)
        for lane, (wanted, found) in enumerate(zip(ids, actual, strict=True)):
            row, head = rows[lane // heads], lane % heads
            expected, misses = self._expected(layer, row, head, wanted)
            if list(found) != expected:
                raise Violation(
                    f"layer {layer}, lane {lane}, {row}, ids {wanted}: the plan is "
                    f"{dict(zip(plan, found, strict=True))}, expected {expected}"
                )
            for (_, slot), host in zip(misses, expected[2], strict=False):
                page, within = divmod(host, per_page)
                loaded.append((row.slot * heads + head, slot, page, head, within))
        self._check_memory(layer, loaded)

    def _expected(
        self, layer: int, row: Row, head: int, wanted: list[int]
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        group, slot = self.group, row.slot
        units: list[int] = []
        misses: list[tuple[int, int]] = []
        places: list[int] = []
        if slot >= 0:
            newest = (row.length - 1) // group.unit
            low, index = max(0, newest - group.ring_slots + 1), slot * group.lane_heads + head
            lane = self.lanes[layer, index]
            if self._fits(self.slots[slot]):
                units = [unit for unit in dict.fromkeys(wanted) if 0 <= unit < newest]
            else:
                units, misses = lane.select(wanted, newest, low)
                self._note(layer, index, lane)
            first, ring = group.buffer_slots, group.ring_slots
            places = [first + u % ring if u >= low else lane.slot_of[u] for u in units]
        gap, tail = [-1] * (group.select - len(misses)), [-1] * (group.select - len(units))
        hosts = [self.bench.host_id(slot, unit) for unit, _ in misses]
        taken = [place for _, place in misses]
        return [places + tail, len(units), hosts + gap, taken + gap, len(misses)], misses

    def _check_memory(self, layer: int, loaded: list[tuple[int, int, int, int, int]]) -> None:
        """Check orders and maps of all rows of the layer, and bytes of the slots just loaded."""
        store = self.bench.store
        for name, expected in (
            ("order", self.order),
            ("slot_unit", self.held),
            ("unit_slot", self.inverse),
        ):
            actual = getattr(store, name)[layer].cpu().numpy()
            if not np.array_equal(actual, expected[layer]):
                row = int(np.flatnonzero((actual != expected[layer]).any(-1))[0])
                raise Violation(
                    f"{name} of layer {layer}, row {row} is {actual[row].tolist()}, "
                    f"expected {expected[layer, row].tolist()}"
                )
        if loaded:
            row, slot, page, head, within = torch.tensor(loaded).T
            where = (row.to(self.device), slot.to(self.device))
            kept = store.buffer[layer][where].cpu().flatten(1).view(torch.uint8).numpy()
            true = self.truth[page, layer, head, within]
            if not np.array_equal(kept, true):
                bad = int(np.flatnonzero((kept != true).any(1))[0])
                raise Violation(f"bytes of layer {layer}, (row, slot, ..) {loaded[bad]}")
