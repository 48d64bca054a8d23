"""Places of the units of a request, and the hooks that both implementations share.

``ring_low``, ``fits`` and ``ring_slot`` are what the kernels work out from the step tensors; here
positions, logical ids and slots are plain ints.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from topkv.hooks.transfer import TransferSetup
from topkv.kv.store import UNSELECTED
from topkv.plugins.discovery import hookimpl

Units = TypeVar("Units", int, Tensor)


class ZeroCopyTransfer:
    """Base of both implementations of ``zero_copy``, which add the other hooks.

    Args:
        setup: see ``topkv.hooks.transfer``, where the contracts of all hooks stand.

    Attributes:
        store, layers, eviction, max_queries: as in the setup.
        group: shapes of the group.
        host: form of its entries in the host pool.
        step: the step tensors, the same ones in all of its layers.
        sparse: True if the group has a ring and a buffer; the pages of others are on the device.
    """

    def __init__(self, setup: TransferSetup) -> None:
        self.store = setup.store
        self.layers = setup.layers
        self.eviction, self.max_queries = setup.eviction, setup.max_queries
        self.group = setup.store.group
        self.host = setup.store.host
        self.step = setup.layers[0].step
        self.sparse = self.group.residency == "sparse"

    def ring_low(self, high: int) -> int:
        """Return the first unit in the ring of a request whose length has reached ``high``."""
        return max(0, (high - 1) // self.group.unit - self.group.ring_slots + 1)

    def ring_slot(self, unit: Units) -> Units:
        """Return the slot of units that are in the ring."""
        return self.group.buffer_slots + unit % self.group.ring_slots

    def fits(self, high: int, resident: bool) -> bool:
        """Return True if LRU slot u holds unit u for every closed unit u that left the ring."""
        return resident and (high - 1) // self.group.unit <= self.group.buffer_slots

    def host_places(self, slot: int, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of a request's units in the host pool. Waits for the device.

        Args:
            slot: request slot.
            units: int64 ``[n]`` logical ids, on the CPU.

        Returns:
            Host page of each, and its place in that page: int64 ``[n]``, indices of the first and
            fourth dimension of ``store.entries``, on its device.
        """
        per_page, device = self.group.units_per_page, self.store.entries.device
        pages = self.step.page_table[slot].cpu().long()[units // per_page]
        return pages.to(device), (units % per_page).to(device)

    def hold(self, layers: int | slice, slot: int, units: Tensor) -> Tensor:
        """Enter units u under slots u of a request that fits, in layers of the group.

        Args:
            layers: index within the group, or several.
            slot: request slot.
            units: int64 ``[n]`` logical ids, on the CPU, in ascending order.

        Returns:
            Those of them that the buffer has room for, on its device.
        """
        store, lanes = self.store, self.store.lanes_of(slot)
        kept = units[units < self.group.buffer_slots].to(store.order.device)
        store.unit_slot[layers, lanes, kept] = kept.int()
        store.slot_unit[layers, lanes, kept] = kept.int()
        return kept

    @hookimpl
    def restore(self, slot: int, length: int, resident: bool) -> None:
        if not self.sparse:
            return
        self.reset(slot)
        store, low, fits = self.store, self.ring_low(length), self.fits(length, resident)
        units = torch.arange(0 if fits else low, -(-length // self.group.unit))
        pages, within = self.host_places(slot, units)
        found = store.entries[pages, :, :, within].to(store.buffer.device)
        found = self.host.decode(self.host.parts(found))
        entries = found.permute(1, 2, 0, 3, 4, 5, 6)  # [L, lane_heads, units, *entry_shape]
        lanes, in_ring = store.lanes_of(slot), units >= low
        buffer = store.buffer[:, lanes]
        buffer[:, :, self.ring_slot(units[in_ring])] = entries[:, :, in_ring]
        if fits:
            kept = self.hold(slice(None), slot, units)
            buffer[:, :, kept] = entries[:, :, : len(kept)]

    @hookimpl
    def reset(self, slot: int) -> None:
        if not self.sparse:
            return
        store, lanes = self.store, self.store.lanes_of(slot)
        store.unit_slot[:, lanes] = -1
        store.slot_unit[:, lanes] = -1
        store.order[:, lanes] = torch.arange(
            self.group.buffer_slots, dtype=torch.int32, device=store.order.device
        )
        store.state[:, lanes] = 0
        store.stamp[lanes] = UNSELECTED
