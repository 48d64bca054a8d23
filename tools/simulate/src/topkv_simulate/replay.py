"""Replay of a trace through buffers of any size: the work of the plan, for all lanes at once.

``topkv.transfer.reference`` does the same one lane at a time. Slots have no numbers here: a lane
is the list of its units by eviction order, coldest first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen

from topkv_simulate.policies import LeastRecentlyUsed, policy_of
from topkv_simulate.trace import EVENT, KIND, ROW, Geometry, Group, Trace, TraceError


@frozen(eq=False)
class Wanted:
    """Units that the layers of a group want from a buffer, whatever its size.

    N = L * H lanes of a request. A free slot holds unit ``free``, which nobody selects.

    Attributes:
        geometry: geometry of the group.
        units: int32 ``[R, N, K]`` distinct selected units that have left the ring, in selection
            order; ``free`` where there is none.
        ring: int64 ``[R, N]`` selected units that are in the ring.
    """

    geometry: Geometry
    units: np.ndarray
    ring: np.ndarray
    free: int = field()

    @classmethod
    def of(cls, trace: Trace, group: Group) -> Wanted:
        """Make the wanted units from ids of any kind, as the plan reads them."""
        geometry, free = group.geometry, group.geometry.max_units
        rows, layers, heads, width = group.ids.shape
        ids = group.ids.reshape(rows, layers * heads, width)
        valid = (ids >= 0) & (ids < group.limits[:, None, None])
        ids = np.where(valid, ids, free)
        order = np.argsort(ids, axis=-1, kind="stable")
        ascending = np.take_along_axis(ids, order, -1)
        again = np.zeros_like(valid)
        repeats = ascending[..., 1:] == ascending[..., :-1]
        np.put_along_axis(again, order[..., 1:], repeats, -1)
        valid &= ~again
        in_ring = valid & (ids >= geometry.ring_low(trace.rows[:, ROW.high])[:, None, None])
        units = np.where(valid & ~in_ring, ids, free)
        return cls(geometry, units, in_ring.sum(-1), free)


@frozen(eq=False)
class Counts:
    """Counts of one group: selected units that were there, and that had to be loaded.

    Attributes:
        hits, misses: int64 ``[R, L, H]``.
    """

    hits: np.ndarray
    misses: np.ndarray


class Lanes:
    """The buffers of all lanes of a group. S slots of requests, C buffer slots.

    Args:
        trace: trace whose rows are replayed.
        wanted: wanted units of the group.
        slots: C, at least K.
        policy: the eviction policy.

    Attributes:
        held: int32 ``[S, N, C]`` units by eviction order, coldest first; ``free`` in free slots.
        present: bool ``[S, N, units + 1]``, True where a unit is held.
    """

    def __init__(
        self, trace: Trace, wanted: Wanted, slots: int, policy: LeastRecentlyUsed
    ) -> None:
        self.trace, self.wanted, self.slots, self.policy = trace, wanted, slots, policy
        requests = int(trace.rows[:, ROW.slot].max(initial=-1)) + 1
        lanes, self.free = wanted.units.shape[1], wanted.free
        self.held = np.full((requests, lanes, slots), self.free, np.int32)
        self.present = np.zeros((requests, lanes, self.free + 1), bool)
        self.hits, self.misses = (np.zeros(wanted.units.shape[:2], np.int64) for _ in range(2))

    def write(self, event: np.ndarray) -> None:
        """Apply a WRITE: a lane that fits has unit u in slot u, which is position u."""
        geometry = self.wanted.geometry
        kind, slot, start, end, high, resident = event.tolist()
        if not geometry.fits(high, resident, self.slots):
            return
        behind = end if kind == KIND.CLOSE else end + geometry.unit - 1
        units = np.arange(start // geometry.unit, behind // geometry.unit)
        units = units[units < self.slots]
        self.held[slot][:, units] = units
        self.present[slot][:, units] = True

    def reset(self, slot: int) -> None:
        """Forget the buffers of a slot."""
        self.held[slot], self.present[slot] = self.free, False

    def plan(self, rows: slice) -> None:
        """Run one round: count, then move the buffers of the lanes that do not fit."""
        table = self.trace.rows[rows]
        slots, units = table[:, ROW.slot], self.wanted.units[rows]
        there = np.take_along_axis(self.present[slots], units, -1)
        missing = ~there & (units != self.free)
        self.hits[rows] = self.wanted.ring[rows] + there.sum(-1)
        self.misses[rows] = missing.sum(-1)
        geometry = self.wanted.geometry
        moves = ~geometry.fits(table[:, ROW.high], table[:, ROW.resident], self.slots)
        if moves.any():
            self._move(slots[moves], units[moves], missing[moves])
        self.policy.used(rows, slots, units)

    def _move(self, slots: np.ndarray, units: np.ndarray, missing: np.ndarray) -> None:
        """Load missing units and evict; ``units`` and ``missing`` are ``[B, N, K]``."""
        held = self.policy.reordered(self.held[slots], slots)
        selected = np.zeros_like(self.present[slots])
        np.put_along_axis(selected, units, True, -1)
        selected[..., self.free] = False
        stale = ~np.take_along_axis(selected, held, -1)
        before = np.cumsum(stale, -1) - stale
        misses = missing.sum(-1, keepdims=True)
        victim = stale & (before < misses)
        # The i-th victim takes the i-th missing unit.
        arriving = np.take_along_axis(units, np.argsort(~missing, -1, kind="stable"), -1)
        taken = np.take_along_axis(arriving, np.minimum(before, units.shape[-1] - 1), -1)
        gone, filled = np.where(victim, held, self.free), np.where(victim, taken, held)
        target = self.policy.new_position(stale, before, misses)
        moved = np.empty_like(held)
        np.put_along_axis(moved, target, filled, -1)
        self.held[slots] = moved
        present = self.present[slots]
        np.put_along_axis(present, gone, False, -1)
        np.put_along_axis(present, np.where(missing, units, self.free), True, -1)
        present[..., self.free] = False
        self.present[slots] = present

    def run(self) -> Counts:
        """Replay all events in order, and return the counts."""
        rounds = self.trace.rows[:, ROW.round]
        first = np.searchsorted(rounds, np.arange(len(self.trace.events) + 1)).tolist()
        for event in self.trace.events:
            kind, slot = int(event[EVENT.kind]), int(event[EVENT.slot])
            if kind == KIND.PLAN:
                self.plan(slice(first[slot], first[slot + 1]))
            elif slot < len(self.held):  # others are never planned
                self.reset(slot) if kind == KIND.RESET else self.write(event)
        geometry = self.wanted.geometry
        shape = (len(rounds), len(geometry.layers), geometry.lane_heads)
        return Counts(self.hits.reshape(shape), self.misses.reshape(shape))


class Replayer:
    """Replays one trace, several times; what does not depend on the buffer is worked out once.

    Args:
        trace: the recorded trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.wanted = [Wanted.of(trace, group) for group in trace.groups]
        self._policies: dict[tuple[str, int], Any] = {}

    def run(self, slots: list[int], policy: str) -> list[Counts]:
        """Return hits and misses of every row, layer and lane.

        Args:
            slots: buffer slots of each group; at least the width of its selection.
            policy: ``"belady"``, or the name of an eviction policy that is installed.

        Raises:
            TraceError: a buffer does not hold a selection.
            PluginError: there is no such policy.
        """
        shapes = [each.geometry for each in self.wanted]
        reasons = [
            f"layers {list(shape.layers)}: a buffer of {count} units of {shape.unit} tokens does "
            f"not hold a selection of {shape.select}; take {shape.select * shape.unit} tokens"
            for shape, count in zip(shapes, slots, strict=True)
            if count < shape.select
        ]
        if reasons:
            raise TraceError("the buffer is too small", reasons)
        found = []
        for index, (wanted, count) in enumerate(zip(self.wanted, slots, strict=True)):
            key = policy, index
            if key not in self._policies:
                self._policies[key] = policy_of(policy, self.trace, wanted.units, wanted.free)
            self._policies[key].begin()
            found.append(Lanes(self.trace, wanted, count, self._policies[key]).run())
        return found

    def check(self) -> None:
        """Replay the trace in its own sizes, and compare every count with the coordinator's.

        Raises:
            TraceError: with the layers that differ.
        """
        slots = [group.geometry.buffer_slots for group in self.trace.groups]
        policy = self.trace.settings["eviction"]
        reasons = []
        for group, counts in zip(self.trace.groups, self.run(slots, policy), strict=True):
            replayed = np.stack([counts.hits, counts.misses], -1)
            for place in np.flatnonzero((replayed != group.counts).any((0, 2, 3))).tolist():
                got = replayed[:, place].sum((0, 1)).tolist()
                known = group.counts[:, place].sum((0, 1)).tolist()
                reasons.append(
                    f"layer {group.geometry.layers[place]}: {known[0]} hits and {known[1]} misses "
                    f"were counted, {got[0]} and {got[1]} are replayed"
                )
        if reasons:
            raise TraceError(
                f"the trace does not replay as it was recorded, with {policy} and the buffers of "
                "then; the file was changed, or the transfer engine counts by other rules",
                reasons,
            )
