"""The transfer engine in plain torch, one lane at a time: what the kernels have to do.

Logical ids, host ids and slots of a lane are tensors of ints here. Nothing is hot, and yet no line
runs once for each token: whoever has no GPU waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.plugins.contract import has_hook
from topkv.plugins.discovery import hookimpl
from topkv.transfer.geometry import ZeroCopyTransfer
from topkv.types import LayerView, Plan


class ReferenceTransfer(ZeroCopyTransfer):
    """``zero_copy`` without kernels. The contracts stand in ``topkv.hooks.transfer``."""

    @hookimpl
    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step = layer.step
        entries_of = self._ring_entries if self.sparse else self._host_entries
        for batch in range(step.batch):
            slot, length = int(step.slots[batch]), int(step.lengths[batch])
            if slot < 0:
                continue
            new = int(step.appended[batch])
            for nth in range(new):
                unit, offset = divmod(length - new + nth, self.group.unit)
                planes = entries_of(layer, slot, unit).unbind(2)
                for plane, rows in zip(planes, (k, v), strict=False):
                    plane[:, :, offset] = rows[batch, nth].unflatten(0, plane.shape[:2])

    @hookimpl
    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        group, step = self.group, layer.step
        for tensor in (out.slots, out.miss_hosts, out.miss_slots):
            tensor.fill_(-1)
        for lane in range(step.batch * group.lane_heads):
            batch, head = divmod(lane, group.lane_heads)
            slot = int(step.slots[batch])
            if slot < 0:
                out.count[lane] = out.misses[lane] = 0
                continue
            bound = int(limit[batch])
            high = int(step.high[batch])
            first = dict.fromkeys(unit for unit in ids[lane].tolist() if 0 <= unit < bound)
            units = torch.tensor(list(first), dtype=torch.int64, device=ids.device)
            in_ring = units >= self.ring_low(high)
            lane_row = slot * group.lane_heads + head
            fits = self.fits(high, bool(step.resident[batch]))
            missed = self._plan_lane(layer, lane_row, units[~in_ring], fits)

            slot_of = self.store.unit_slot[layer.index, lane_row]
            slots = torch.where(in_ring, self.ring_slot(units).int(), slot_of[units])
            out.slots[lane, : len(units)] = slots
            page, within = missed // group.units_per_page, missed % group.units_per_page
            hosts = step.page_table[slot, page] * group.units_per_page + within
            out.miss_hosts[lane, : len(missed)] = hosts
            out.miss_slots[lane, : len(missed)] = slot_of[missed]
            out.count[lane], out.misses[lane] = len(units), len(missed)
            counters = self.store.counters[layer.index, lane_row]
            counters += counters.new_tensor([len(units) - len(missed), len(missed)])

    def _plan_lane(self, layer: LayerView, lane_row: int, units: Tensor, fits: bool) -> Tensor:
        """Move one lane's buffer to distinct units that left the ring; return the missed ones."""
        store, index = self.store, layer.index
        slot_of, unit_in = store.unit_slot[index, lane_row], store.slot_unit[index, lane_row]
        order, state = store.order[index, lane_row], store.state[index, lane_row]
        present = slot_of[units] >= 0
        hits, missed = units[present], units[~present]
        if fits:
            return missed

        selected = torch.zeros(order.numel(), dtype=torch.bool, device=order.device)
        selected[slot_of[hits].long()] = True
        stale = ~selected[order.long()]
        stale_rank = torch.cumsum(stale, 0) - stale.long()
        position = torch.arange(order.numel(), device=order.device)

        victims = order[stale][: len(missed)].clone()
        count = torch.tensor(len(missed), device=order.device)
        after = torch.zeros_like(order)
        if has_hook(self.eviction, "new_state"):
            after = self.eviction.new_state(state, stale, stale_rank, count, order.numel())
        target = self.eviction.new_position(
            position,
            stale,
            stale_rank,
            position - stale_rank,
            stale.sum(),
            count,
            order.numel(),
            after,
        )
        order[target] = order.clone()
        if len(state):
            state[target] = after
        evicted = unit_in[victims.long()]
        slot_of[evicted[evicted >= 0].long()] = -1
        slot_of[missed], unit_in[victims.long()] = victims, missed.int()
        return missed

    @hookimpl
    def load(self, layer: LayerView, plan: Plan) -> None:
        group, store, step = self.group, self.store, layer.step
        for lane in range(step.batch * group.lane_heads):
            batch, head = divmod(lane, group.lane_heads)
            lane_row = int(step.slots[batch]) * group.lane_heads + head
            misses = int(plan.misses[lane])
            hosts = plan.miss_hosts[lane, :misses].to(store.entries.device).long()
            pages, within = hosts // group.units_per_page, hosts % group.units_per_page
            found = self.host.parts(store.entries[pages, layer.index, head, within])
            slots = plan.miss_slots[lane, :misses].long()
            loaded = self.host.decode(found).to(store.buffer.device)
            store.buffer[layer.index, lane_row, slots] = loaded

    @hookimpl
    def offload(self) -> None:
        if not self.sparse:
            return
        step, unit = self.step, self.group.unit
        for batch in range(step.batch):
            slot, length = int(step.slots[batch]), int(step.lengths[batch])
            if slot < 0 or length == 0:
                continue
            fits = self.fits(int(step.high[batch]), bool(step.resident[batch]))
            for filled in range((length - int(step.appended[batch])) // unit, length // unit):
                self._write_back(slot, filled, fits)

    @hookimpl
    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        if self.sparse and length > 0:
            self._write_back(slot, (length - 1) // self.group.unit, self.fits(high, resident))

    @hookimpl
    def store_chunk(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        k: Tensor,
        v: Tensor,
        high: int,
        resident: bool,
    ) -> None:
        group, store = self.group, self.store
        positions = torch.arange(start, start + k.shape[0])
        units, offsets = positions // group.unit, positions % group.unit
        pages, within = self.host_places(slot, units)
        lanes = (group.lane_heads, group.heads_per_lane)
        parts = self.host.parts(store.entries[:, layer.index])
        for part, *coded in zip(parts, self.host.encode(k), self.host.encode(v), strict=True):
            for tokens, rows in zip(part.unbind(4), coded, strict=False):
                rows = rows.unflatten(1, lanes).to(part.device)
                tokens[pages, :, within, :, offsets] = rows
        if not self.sparse:
            return
        if self.fits(high, resident):
            self.hold(layer.index, slot, units)
        in_ring = (units >= self.ring_low(high)).nonzero().flatten()
        for head in range(group.lane_heads):
            lane_row = slot * group.lane_heads + head
            places = store.unit_slot[layer.index, lane_row].cpu()[units].long()
            held = (places >= 0).nonzero().flatten()
            heads = slice(head * group.heads_per_lane, (head + 1) * group.heads_per_lane)
            planes = store.buffer[layer.index, lane_row].unbind(2)
            for tokens, rows in zip(planes, (k, v), strict=False):
                ring = self.ring_slot(units[in_ring])
                tokens[ring, :, offsets[in_ring]] = rows[in_ring.to(rows.device), heads]
                tokens[places[held], :, offsets[held]] = rows[held.to(rows.device), heads]

    @hookimpl
    def fetch(self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        size = self.group.unit
        units = torch.arange(start // size, -(-(start + k.shape[0]) // size))
        pages, within = self.host_places(slot, units)
        # [units, lane_heads, heads_per_lane, planes, unit, D]
        found = self.store.entries[pages, layer.index, :, within]
        entries = self.host.decode(self.host.parts(found))
        tokens = entries.flatten(1, 2).permute(2, 0, 3, 1, 4).flatten(1, 2)
        for plane, rows in zip(tokens, (k, v), strict=False):  # [tokens, Hkv, D]
            rows.copy_(plane[: rows.shape[0]])

    def _write_back(self, slot: int, unit: int, fits: bool) -> None:
        """Copy one unit from the ring to the host, and to its LRU slot if it has one.

        A lane that fits gets its unit u in slot u here. In others an old copy has to follow, or a
        unit that was rolled back would come back with the tokens that were rejected.
        """
        lanes = self.store.lanes_of(slot)
        for layer in self.layers:
            entries = self._ring_entries(layer, slot, unit)
            parts = self.host.parts(self._host_entries(layer, slot, unit))
            for part, rows in zip(parts, self.host.encode(entries), strict=True):
                part.copy_(rows)
            if fits:
                self.hold(layer.index, slot, torch.tensor([unit]))
            buffer = self.store.buffer[layer.index, lanes]
            for head, at in enumerate(self.store.unit_slot[layer.index, lanes, unit].tolist()):
                if at >= 0:
                    buffer[head, at] = entries[head]

    def _host_entries(self, layer: LayerView, slot: int, unit: int) -> Tensor:
        """Return a unit's entries in the host pool, ``[lane_heads, *entry_shape]`` or coded."""
        page, within = divmod(unit, self.group.units_per_page)
        return self.store.entries[int(self.step.page_table[slot, page]), layer.index, :, within]

    def _ring_entries(self, layer: LayerView, slot: int, unit: int) -> Tensor:
        """Return a unit's entries in the ring, ``[lane_heads, *entry_shape]``."""
        return self.store.buffer[layer.index, self.store.lanes_of(slot), self.ring_slot(unit)]
