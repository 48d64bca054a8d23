"""The expected content of both tiers: bytes of every token, one ordered buffer a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from topkv_fp8_host_format.rows import rounded
from topkv_testing.models.oracle import LaneModel
from topkv_testing.transfer.bench import Row, TransferBench, random_tokens, raw

Ids = Sequence[Sequence[Sequence[int]]]
"""Ids by layer, lane and column."""


@define
class Request:
    """The truth about one request.

    Attributes:
        tokens: ``[L, length, Hkv, planes, D]`` keys and values on the CPU.
        resident: as in ``StepTensors``.
        high: the largest length that the ring has seen.
        on_host: number of first tokens that are on the host.
        dirty: decode has appended since the open unit was flushed.
    """

    tokens: Tensor
    resident: bool
    high: int = 0
    on_host: int = 0
    dirty: bool = False

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


class TokenCache:
    """Drives a bench as a coordinator would, beside the expected state.

    Every call checks that it changed nothing of other requests; ``check`` compares the rest.
    """

    def __init__(self, bench: TransferBench, seed: int = 0) -> None:
        self.bench, self.group = bench, bench.group
        self.generator = torch.Generator().manual_seed(seed)
        self.requests: dict[int, Request] = {}
        self.layers = range(len(self.group.layers))
        rows = [(layer, row) for layer in self.layers for row in range(self.group.max_lanes)]
        self.lanes = {row: LaneModel(self.group.buffer_slots) for row in rows}
        self.counters = {row: [0, 0] for row in rows}

    # State that follows from the lengths.

    def fits(self, request: Request) -> bool:
        """Return True if slot u holds unit u for every closed unit: the lane needs no plan."""
        newest = (request.high - 1) // self.group.unit
        return request.resident and newest <= self.group.buffer_slots

    def low(self, high: int) -> int:
        """The first unit in the ring."""
        return max(0, (high - 1) // self.group.unit - self.group.ring_slots + 1)

    def _rows(self, slot: int) -> list[tuple[int, int]]:
        lanes = self.bench.store.lanes_of(slot)
        return [(layer, row) for layer in self.layers for row in range(lanes.start, lanes.stop)]

    def _hold(self, slot: int, units: Sequence[int]) -> None:
        """Put unit u into slot u of each lane that fits."""
        if self.fits(self.requests[slot]):
            for layer, row in self._rows(slot):
                for unit in units:
                    if unit < self.group.buffer_slots:
                        self.lanes[layer, row].unit_in[unit] = unit

    def _forget(self, slot: int) -> None:
        """Reset the lanes of a request, but not the counters."""
        for row in self._rows(slot):
            self.lanes[row].reset()

    def new_tokens(self, count: int) -> Tensor:
        """Random bytes, ``[L, count, Hkv, planes, D]``, rounded where entries are coded."""
        group = self.group
        shape = (len(group.layers), count, group.num_kv_heads, group.planes, group.head_dim)
        tokens = random_tokens(shape, group.dtype, self.generator)
        return rounded(tokens) if group.coded_bytes else tokens

    def _halves(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as slices of one wider tensor: rows apart, heads and D contiguous.

        Both are the same slice where there is one plane, as a coordinator gives them.
        """
        both = tokens.transpose(1, 2).contiguous().to(self.bench.device)
        return both[:, 0], both[:, -1]

    # Calls.

    def begin(self, slot: int, resident: bool = False) -> None:
        """Begin a request in a slot, whoever had it."""
        with self.bench.touching([slot]):
            self.bench.engine.reset(slot)
        self._forget(slot)
        self.requests[slot] = Request(self.new_tokens(0), resident)

    def prefill(self, slot: int, count: int) -> None:
        """Append a chunk of the prompt in every layer."""
        self.flush(slot)
        bench, request, start = self.bench, self.requests[slot], self.requests[slot].length
        if count == 0:
            return
        chunk = self.new_tokens(count)
        request.tokens = torch.cat([request.tokens, chunk], 1)
        request.high = max(request.high, start + count)
        for layer in self.layers:
            k, v = self._halves(chunk[layer])
            with bench.touching([slot], [layer], [slot]):
                bench.engine.store_chunk(
                    *(bench.views[layer], slot, start, k, v, request.high, request.resident)
                )
        request.on_host = request.length
        first, last = start // self.group.unit, (request.length - 1) // self.group.unit
        self._hold(slot, range(first, last + 1))

    def decode(
        self,
        slots: Sequence[int],
        ids: Ids | None = None,
        appends: Sequence[int] | None = None,
        queries: int = 1,
    ) -> None:
        """One step of some requests, -1 for padded rows: append, plan, load, offload.

        Args:
            slots: of the rows.
            ids: that each layer selects; None where nothing is planned.
            appends: tokens that each row appends, at most ``queries``; one each if None.
            queries: tokens of a row, those behind what it appends being padding.
        """
        bench, live = self.bench, [slot for slot in slots if slot >= 0]
        new = self.new_tokens(len(slots) * queries).unflatten(1, (len(slots), queries))
        counts = [1] * len(slots) if appends is None else [int(count) for count in appends]
        rows = [
            self._advance(slot, new[:, index, : counts[index]]) for index, slot in enumerate(slots)
        ]
        bench.put(rows)
        for layer in self.layers:
            with bench.touching(live, [layer]):
                k, v = self._halves(new[layer].flatten(0, 1))
                shape = (len(slots), queries)
                bench.engine.append(
                    bench.views[layer], k.unflatten(0, shape), v.unflatten(0, shape)
                )
                if ids is not None:
                    self.select(layer, rows, ids[layer])
        unit = self.group.unit
        filled = {r.slot: range((r.length - r.appended) // unit, r.length // unit) for r in rows}
        closing = [slot for slot, units in filled.items() if units]
        with bench.touching(closing, pages_of=closing):
            bench.engine.offload()
        for slot in closing:
            self.requests[slot].on_host = filled[slot].stop * unit
            self._hold(slot, filled[slot])

    def _advance(self, slot: int, tokens: Tensor) -> Row:
        if slot < 0:
            return Row()
        request, appended = self.requests[slot], tokens.shape[1]
        if appended:
            request.tokens = torch.cat([request.tokens, tokens], 1)
            request.high = max(request.high, request.length)
            request.dirty = True
        return Row(slot, request.length, request.high, appended, request.resident)

    def select(
        self, layer: int, rows: Sequence[Row], ids: Sequence[Sequence[int]]
    ) -> dict[str, list[Any]]:
        """Plan and load the rows of the last ``put``; return the plan, which is the model's."""
        plan = self.bench.run(layer, ids)
        for lane, wanted in enumerate(ids):
            batch, head = divmod(lane, self.group.lane_heads)
            expected = self._expected(layer, rows[batch], head, wanted)
            actual = {name: values[lane] for name, values in plan.items()}
            assert actual == expected, (
                f"layer {layer}, lane {lane}, ids {wanted}, {rows[batch]}: the plan is {actual}, "
                f"expected {expected}"
            )
        return plan

    def _expected(self, layer: int, row: Row, head: int, ids: Sequence[int]) -> dict[str, Any]:
        group, slot = self.group, row.slot
        units: list[int] = []
        misses: list[tuple[int, int]] = []
        places: list[int] = []
        if slot >= 0:
            limit = row.selectable(group.unit)
            low, where = self.low(row.high), (layer, slot * group.lane_heads + head)
            lane = self.lanes[where]
            if self.fits(self.requests[slot]):
                units = [unit for unit in dict.fromkeys(ids) if 0 <= unit < limit]
            else:
                units, misses = lane.select(ids, limit, low)
            places = [
                group.buffer_slots + unit % group.ring_slots
                if unit >= low
                else lane.unit_in.index(unit)
                for unit in units
            ]
            self.counters[where][0] += len(units) - len(misses)
            self.counters[where][1] += len(misses)

        def padded(values: list[int]) -> list[int]:
            return values + [-1] * (group.select - len(values))

        return {
            "slots": padded(places),
            "count": len(units),
            "miss_hosts": padded([self.bench.host_id(slot, unit) for unit, _ in misses]),
            "miss_slots": padded([place for _, place in misses]),
            "misses": len(misses),
        }

    def flush(self, slot: int) -> None:
        """Bring the open unit to the host, if decode has left one."""
        request = self.requests[slot]
        if request.dirty:
            state = (request.length, request.high, request.resident)
            with self.bench.touching([slot], pages_of=[slot]):
                self.bench.engine.flush(slot, *state)
            request.on_host = request.length
            if request.length:
                self._hold(slot, [(request.length - 1) // self.group.unit])
            request.dirty = False

    def can_roll_back(self, slot: int, length: int) -> bool:
        """Return True if the new tail is still in the ring."""
        low = self.low(self.requests[slot].high)
        return low == 0 or (length - 1) // self.group.unit >= low

    def rollback(self, slot: int, length: int) -> None:
        """Roll the newest tokens back: a change of length, which no engine sees."""
        request = self.requests[slot]
        request.tokens = request.tokens[:, :length]
        request.on_host = min(request.on_host, length)
        request.dirty = True

    def truncate(self, slot: int, length: int, resident: bool) -> None:
        """Cut a request and fill its device rows anew from the host."""
        self.flush(slot)
        request = self.requests[slot]
        request.tokens = request.tokens[:, :length]
        request.high = request.on_host = length
        request.resident = resident
        with self.bench.touching([slot]):
            self.bench.engine.restore(slot, length, resident)
        self._forget(slot)
        self._hold(slot, range(-(-length // self.group.unit)))

    # Invariants after every call.

    def check(self) -> None:
        """Check that maps follow the models; host, ring and held slots have the tokens' bytes."""
        self.check_maps()
        buffer = self.bench.store.buffer.cpu()
        for slot, request in self.requests.items():
            host = self.bench.host_tokens(slot)[:, : request.on_host]
            assert torch.equal(raw(host), raw(request.tokens[:, : request.on_host])), (
                f"host bytes of slot {slot}, of which {request.on_host} tokens are there"
            )
            self._check_ring(slot, request, buffer)
            self._check_held(slot, request, buffer)

    def check_maps(self) -> None:
        """Check every lane of every layer: order, the two maps, and the counters."""
        store = self.bench.store
        order, held, slot_of, counters = (
            tensor.tolist()
            for tensor in (store.order, store.slot_unit, store.unit_slot, store.counters)
        )
        for (layer, row), lane in self.lanes.items():
            where = f"layer {layer}, row {row}"
            units = [-1 if unit is None else unit for unit in lane.unit_in]
            inverse = [-1] * self.group.max_units
            for slot, unit in enumerate(units):
                if unit >= 0:
                    inverse[unit] = slot
            assert sorted(order[layer][row]) == list(range(self.group.buffer_slots)), where
            assert order[layer][row] == lane.order, f"order of {where}"
            assert held[layer][row] == units, f"units by slot of {where}"
            assert slot_of[layer][row] == inverse, f"slots by unit of {where}"
            assert counters[layer][row] == self.counters[layer, row], f"counters of {where}"

    def entry(self, request: Request, layer: int, head: int, unit: int) -> Tensor:
        """The true entry of a unit, ``[heads_per_lane, planes, tokens, D]``, short if open."""
        group = self.group
        heads = slice(head * group.heads_per_lane, (head + 1) * group.heads_per_lane)
        tokens = request.tokens[layer, unit * group.unit : (unit + 1) * group.unit, heads]
        return tokens.permute(1, 2, 0, 3)

    def _check_ring(self, slot: int, request: Request, buffer: Tensor) -> None:
        group = self.group
        units = range(self.low(request.high), -(-request.length // group.unit))
        for layer, row in self._rows(slot):
            for unit in units:
                true = self.entry(request, layer, row - slot * group.lane_heads, unit)
                place = group.buffer_slots + unit % group.ring_slots
                kept = buffer[layer, row, place][:, :, : true.shape[2]]
                assert torch.equal(raw(kept), raw(true)), f"ring: slot {slot}, unit {unit}"

    def _check_held(self, slot: int, request: Request, buffer: Tensor) -> None:
        """Check closed units only: a copy of a reopened unit is written anew when it closes."""
        group = self.group
        for layer, row in self._rows(slot):
            for place, unit in enumerate(self.lanes[layer, row].unit_in):
                if unit is not None and unit < request.length // group.unit:
                    true = self.entry(request, layer, row - slot * group.lane_heads, unit)
                    kept = buffer[layer, row, place]
                    assert torch.equal(raw(kept), raw(true)), f"held: slot {slot}, unit {unit}"
