"""The transfer engine of the core: the device buffer is a cache over mapped host memory.

Missed entries are read straight from host memory by the copying kernel (zero copy). Contracts
stand in ``topkv.hooks.transfer``; ``impl`` chooses reference or kernels once, when it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv.hooks.registry import hookimpl
from topkv.hooks.transfer import TransferSetup
from topkv.kv.store import UNSELECTED
from topkv.transfer import reference
from topkv.types import LayerView, Plan


class ZeroCopyTransfer:
    """Plan, load and offload for one group.

    Args:
        setup: see ``topkv.hooks.transfer``.
        impl: ``"reference"`` or ``"triton"``.
    """

    def __init__(self, setup: TransferSetup, impl: str = "reference") -> None:
        self.store = setup.store
        self.group = setup.store.group
        self.layers = list(setup.layers)
        self.eviction = setup.eviction
        self.sparse = self.group.residency == "sparse"
        self.launch: Any = None
        if impl == "triton":
            from topkv.transfer.launch import Launcher

            self.launch = Launcher(setup.store, setup.eviction)

    @hookimpl
    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        if self.launch:
            self.launch.append(layer, k, v)
        else:
            reference.append(self.store, layer, k, v)

    @hookimpl
    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        if self.launch:
            self.launch.plan(layer, ids, limit, out)
        else:
            reference.plan(self.store, layer, ids, limit, out, self.eviction.new_position)

    @hookimpl
    def load(self, layer: LayerView, plan: Plan) -> None:
        if self.launch:
            self.launch.load(layer, plan)
        else:
            reference.load(self.store, layer, plan)

    @hookimpl
    def offload(self) -> None:
        if not self.sparse:
            return
        if self.launch:
            self.launch.offload(self.layers[0].step)
        else:
            reference.offload(self.store, self.layers)

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
        put = self.launch.store_chunk if self.launch else self._store_chunk
        put(layer, slot, start, k, v, high, resident)

    def _store_chunk(self, *args: Any) -> None:
        reference.store_chunk(self.store, *args)

    @hookimpl
    def fetch(self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        if self.launch:
            self.launch.fetch(layer, slot, start, k, v)
        else:
            reference.fetch(self.store, layer, slot, start, k, v)

    # Cold from here on: rare, per request, and the same for both implementations.

    @hookimpl
    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        if not self.sparse or length == 0:
            return
        if self.launch:
            step = self.layers[0].step
            self.launch.flush(slot, length, high, resident, step.page_table)
            return
        unit, fits = (length - 1) // self.group.unit, reference.fits(self.group, high, resident)
        for layer in self.layers:
            reference.write_back(self.store, layer, slot, unit, fits)

    @hookimpl
    def restore(self, slot: int, length: int, resident: bool) -> None:
        if not self.sparse:
            return
        self.reset(slot)
        group, store = self.group, self.store
        rows, low = store.rows_of(slot), reference.ring_low(group, length)
        resident = reference.fits(group, length, resident)
        units = torch.arange(0 if resident else low, -(-length // group.unit))
        if not len(units):
            return
        per_page = group.units_per_page
        pages = self.layers[0].step.page_table[slot].cpu().long()[units // per_page]
        found = store.entries[pages, :, :, units % per_page].to(store.buffer.device)
        entries = found.permute(1, 2, 0, 3, 4, 5, 6)  # [L, lane_heads, units, *entry_shape]
        buffer = store.buffer[:, rows]
        in_ring = units >= low
        buffer[:, :, group.buffer_slots + units[in_ring] % group.ring_slots] = entries[
            :, :, in_ring
        ]
        if resident:
            kept = units < group.buffer_slots
            buffer[:, :, units[kept]] = entries[:, :, kept]
            store.unit_slot[:, rows, units[kept]] = units[kept].int().to(store.order.device)
            store.slot_unit[:, rows, units[kept]] = units[kept].int().to(store.order.device)

    @hookimpl
    def reset(self, slot: int) -> None:
        if not self.sparse:
            return
        store, rows = self.store, self.store.rows_of(slot)
        store.unit_slot[:, rows] = -1
        store.slot_unit[:, rows] = -1
        store.order[:, rows] = torch.arange(
            self.group.buffer_slots, dtype=torch.int32, device=store.order.device
        )
        store.stamp[rows] = UNSELECTED
        store.counters[:, rows] = 0


def triton(setup: TransferSetup) -> ZeroCopyTransfer:
    """The engine with its kernels."""
    return ZeroCopyTransfer(setup, "triton")
