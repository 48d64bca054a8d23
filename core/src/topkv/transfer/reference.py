"""The transfer engine in plain torch, one lane at a time: what the kernels have to do.

Positions, logical ids, host ids and slots are plain ints here. Nothing is hot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from topkv.kv.store import GroupStore
from topkv.types import GroupShape, LayerView, Plan

NewPosition = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def ring_low(group: GroupShape, high: int) -> int:
    """The first unit that is in the ring of a request whose length has reached ``high``."""
    return max(0, (high - 1) // group.unit - group.ring_slots + 1)


def fits(group: GroupShape, high: int, resident: bool) -> bool:
    """Whether LRU slot u holds unit u for every closed unit u that left the ring."""
    return resident and (high - 1) // group.unit <= group.buffer_slots


def host_id(group: GroupShape, layer: LayerView, slot: int, unit: int) -> int:
    """The host id of a logical unit."""
    page = int(layer.step.page_table[slot, unit // group.units_per_page])
    return page * group.units_per_page + unit % group.units_per_page


def host_entry(store: GroupStore, layer: LayerView, slot: int, unit: int) -> Tensor:
    """The host entries ``[lane_heads, *entry_shape]`` of a logical unit in one layer."""
    page, within = divmod(host_id(store.group, layer, slot, unit), store.group.units_per_page)
    return store.entries[page, layer.index, :, within]


def append(store: GroupStore, layer: LayerView, k: Tensor, v: Tensor) -> None:
    """Write each row's new token to the ring, or to its page in dense layers."""
    group, step = store.group, layer.step
    for batch in range(step.batch):
        slot, length = int(step.slots[batch]), int(step.lengths[batch])
        if slot < 0 or not step.appended[batch]:
            continue
        unit, offset = divmod(length - 1, group.unit)
        if group.residency == "sparse":
            place = group.buffer_slots + unit % group.ring_slots
            entries = store.buffer[layer.index, store.rows_of(slot), place]
        else:
            entries = host_entry(store, layer, slot, unit)
        _write_tokens(entries, offset, k[batch : batch + 1], v[batch : batch + 1])


def _write_tokens(entries: Tensor, offset: int, k: Tensor, v: Tensor) -> None:
    """Write tokens ``[m, Hkv, D]`` behind ``offset`` of ``[lane_heads, *entry_shape]`` entries."""
    span = slice(offset, offset + k.shape[0])
    lanes = entries.shape[:2]
    for plane, rows in zip(range(entries.shape[2]), (k, v), strict=False):
        entries[:, :, plane, span] = rows.transpose(0, 1).unflatten(0, lanes)


def plan(
    store: GroupStore, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan, policy: NewPosition
) -> None:
    """Resolve ids to slots for every lane. The contract stands in ``topkv.hooks.transfer``."""
    group, step = store.group, layer.step
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
        units = list(dict.fromkeys(unit for unit in ids[lane].tolist() if 0 <= unit < bound))
        low = ring_low(group, high)
        row = slot * group.lane_heads + head
        resident = fits(group, high, bool(step.resident[batch]))
        missed = _plan_lane(store, layer.index, row, units, low, resident, policy)

        slot_of = store.unit_slot[layer.index, row]
        for place, unit in enumerate(units):
            in_ring = group.buffer_slots + unit % group.ring_slots
            out.slots[lane, place] = in_ring if unit >= low else slot_of[unit]
        for place, unit in enumerate(missed):
            out.miss_hosts[lane, place] = host_id(group, layer, slot, unit)
            out.miss_slots[lane, place] = slot_of[unit]
        out.count[lane], out.misses[lane] = len(units), len(missed)
        counters = store.counters[layer.index, row]
        counters += torch.tensor([len(units) - len(missed), len(missed)], device=counters.device)


def _plan_lane(
    store: GroupStore,
    index: int,
    row: int,
    units: list[int],
    low: int,
    resident: bool,
    policy: NewPosition,
) -> list[int]:
    """Move one lane's buffer to the distinct valid ``units``; return the missed ones."""
    slot_of, unit_in = store.unit_slot[index, row], store.slot_unit[index, row]
    order = store.order[index, row]
    buffered = [unit for unit in units if unit < low]
    missed = [unit for unit in buffered if slot_of[unit] < 0]
    if resident:
        return missed

    hits = slot_of[[unit for unit in buffered if slot_of[unit] >= 0]].long()
    selected = torch.zeros(order.numel(), dtype=torch.bool, device=order.device)
    selected[hits] = True
    stale = ~selected[order.long()]
    stale_rank = torch.cumsum(stale, 0) - stale.long()
    position = torch.arange(order.numel(), device=order.device)

    victims = order[stale][: len(missed)].clone()
    target = policy(
        position,
        stale,
        stale_rank,
        position - stale_rank,
        stale.sum(),
        torch.tensor(len(missed), device=order.device),
        order.numel(),
    )
    order[target] = order.clone()
    for unit, victim in zip(missed, victims.tolist(), strict=True):
        evicted = int(unit_in[victim])
        if evicted >= 0:
            slot_of[evicted] = -1
        slot_of[unit], unit_in[victim] = victim, unit
    return missed


def load(store: GroupStore, layer: LayerView, plan: Plan) -> None:
    """Copy the missed entries from the host pool to their slots."""
    group, step = store.group, layer.step
    for lane in range(step.batch * group.lane_heads):
        batch, head = divmod(lane, group.lane_heads)
        row = int(step.slots[batch]) * group.lane_heads + head
        for place in range(int(plan.misses[lane])):
            page, within = divmod(int(plan.miss_hosts[lane, place]), group.units_per_page)
            source = store.entries[page, layer.index, head, within]
            target = int(plan.miss_slots[lane, place])
            store.buffer[layer.index, row, target] = source.to(store.buffer.device)


def offload(store: GroupStore, layers: list[LayerView]) -> None:
    """Copy the units that the step filled to the host, in all layers."""
    group, step = store.group, layers[0].step
    for batch in range(step.batch):
        slot, length = int(step.slots[batch]), int(step.lengths[batch])
        if slot >= 0 and length > 0 and step.appended[batch] and length % group.unit == 0:
            resident = fits(group, int(step.high[batch]), bool(step.resident[batch]))
            for layer in layers:
                write_back(store, layer, slot, length // group.unit - 1, resident)


def write_back(store: GroupStore, layer: LayerView, slot: int, unit: int, resident: bool) -> None:
    """Copy one unit from the ring to the host, and to its LRU slot if it has one."""
    group = store.group
    rows = store.rows_of(slot)
    entries = store.buffer[layer.index, rows, group.buffer_slots + unit % group.ring_slots]
    host_entry(store, layer, slot, unit).copy_(entries)
    for row, entry in zip(range(rows.start, rows.stop), entries, strict=True):
        place = lru_slot(store, layer.index, row, unit, resident)
        if place >= 0:
            store.buffer[layer.index, row, place] = entry


def lru_slot(store: GroupStore, index: int, row: int, unit: int, resident: bool) -> int:
    """The LRU slot of a unit that is being rewritten; a resident lane gets slot ``unit``.

    An old copy has to follow, or a unit that was rolled back would come back with the tokens
    that were rejected.
    """
    if resident and unit < store.group.buffer_slots:
        store.unit_slot[index, row, unit] = unit
        store.slot_unit[index, row, unit] = unit
    return int(store.unit_slot[index, row, unit])


def store_chunk(
    store: GroupStore,
    layer: LayerView,
    slot: int,
    start: int,
    k: Tensor,
    v: Tensor,
    high: int,
    resident: bool,
) -> None:
    """Write a prefill chunk to its pages, to the ring and to LRU slots that hold its units."""
    group = store.group
    end = start + k.shape[0]
    low = ring_low(group, high) if group.residency == "sparse" else 0
    resident = fits(group, high, resident)
    for unit in range(start // group.unit, -(-end // group.unit)):
        first, last = max(start, unit * group.unit), min(end, (unit + 1) * group.unit)
        tokens = slice(first - start, last - start)
        targets = [host_entry(store, layer, slot, unit)]
        if group.residency == "sparse":
            rows = store.rows_of(slot)
            if unit >= low:
                place = group.buffer_slots + unit % group.ring_slots
                targets.append(store.buffer[layer.index, rows, place])
            for row in range(rows.start, rows.stop):
                place = lru_slot(store, layer.index, row, unit, resident)
                if place >= 0:
                    head = row - rows.start
                    heads = slice(head * group.heads_per_lane, (head + 1) * group.heads_per_lane)
                    entry = store.buffer[layer.index, row, place].unsqueeze(0)
                    _write_tokens(entry, first % group.unit, k[tokens, heads], v[tokens, heads])
        for target in targets:
            _write_tokens(target, first % group.unit, k[tokens], v[tokens])


def fetch(
    store: GroupStore, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor
) -> None:
    """Gather positions ``start .. start + n`` of one layer from its pages."""
    group = store.group
    per_page = group.units_per_page
    first = start // group.unit
    units = torch.arange(first, -(-(start + k.shape[0]) // group.unit))
    pages = layer.step.page_table[slot].cpu().long()[units // per_page]
    entries = store.entries[
        pages.to(store.entries.device), layer.index, :, (units % per_page).to(store.entries.device)
    ]  # [units, lane_heads, heads_per_lane, planes, unit, D]
    tokens = entries.flatten(1, 2).permute(2, 0, 3, 1, 4).flatten(1, 2)
    for plane, rows in zip(tokens, (k, v), strict=False):  # [tokens, Hkv, D]
        rows.copy_(plane[: rows.shape[0]])
