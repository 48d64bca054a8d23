"""The tensors of one group: its pages, its device buffer and the maps between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from topkv.hooks.host_format import HostFormat
from topkv.kv.host_format import PLAIN
from topkv.kv.host_pool import POISON, entry_view
from topkv.kv.layout import GroupLayout, lay_out
from topkv.types import GroupShape

UNSELECTED = 2**31 - 1
"""Stamp of a slot that the current step has not selected."""


@define
class GroupStore:
    """Pages, device buffer and maps of one group: L layers, M = ``group.max_lanes`` lane rows,
    C + T slots.

    Attributes:
        group: shapes.
        layout: byte strides of ``pool``.
        pool: uint8, the host pool, or device memory of the same layout for resident layers.
        entries: ``pool`` as ``[pages, L, lane_heads, units_per_page, *entry_shape]``, or uint8
            ``[..., coded_bytes]`` where entries are coded.
        buffer: ``[L, M, C + T, *entry_shape]`` device slots, LRU buffer first, then the ring.
        unit_slot: int32 ``[L, M, max_units]`` LRU slot of a logical unit, -1 where absent.
        slot_unit: int32 ``[L, M, C]`` logical unit in a slot, -1 where free.
        order: int32 ``[L, M, C]`` slots by eviction order, coldest first.
        state: int32 ``[L, M, C]`` of each slot, in eviction order, where the eviction policy keeps
            one; else ``[L, M, 0]``.
        stamp: int32 ``[M, C + T]`` scratch of a plan, ``UNSELECTED`` between plans.
        counters: int64 ``[L, M, 2]`` units that were hit and missed since the store was made.
            Plans add to it and nothing takes away from it.
        before: int64 ``[L, M, 2]`` what ``counters`` were when the request of the lane began.
        host: form of the entries in the host pool.
    """

    group: GroupShape
    layout: GroupLayout
    pool: Tensor
    entries: Tensor
    buffer: Tensor
    unit_slot: Tensor
    slot_unit: Tensor
    order: Tensor
    state: Tensor
    stamp: Tensor
    counters: Tensor
    before: Tensor
    host: HostFormat = PLAIN

    @classmethod
    def on_host(
        cls,
        group: GroupShape,
        layout: GroupLayout,
        pool: Tensor,
        num_pages: int,
        device: torch.device,
        keeps_state: bool = False,
        host: HostFormat = PLAIN,
    ) -> GroupStore:
        """Make the store of a group whose pages are in ``pool``, the host pool.

        Args:
            keeps_state: the eviction policy keeps a number for each slot.
            host: form of the entries in the host pool.
        """
        layers, lanes, slots = len(group.layers), group.max_lanes, group.buffer_slots
        sparse = group.residency == "sparse"

        def ints(*shape: int, fill: int = -1, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        identity = torch.arange(slots, dtype=torch.int32, device=device)
        return cls(
            group,
            layout,
            pool,
            entry_view(pool, group, layout, num_pages),
            buffer=torch.zeros(
                (layers, lanes if sparse else 0, group.slots, *group.entry_shape),
                dtype=group.dtype,
                device=device,
            ),
            unit_slot=ints(layers, lanes if sparse else 0, group.max_units),
            slot_unit=ints(layers, lanes, slots),
            order=identity.expand(layers, lanes, slots).contiguous(),
            state=ints(layers, lanes, slots if keeps_state else 0, fill=0),
            stamp=ints(lanes, group.slots, fill=UNSELECTED),
            counters=ints(layers, lanes if sparse else 0, 2, fill=0, dtype=torch.int64),
            before=ints(layers, lanes if sparse else 0, 2, fill=0, dtype=torch.int64),
            host=host,
        )

    @classmethod
    def on_device(cls, group: GroupShape, num_pages: int, device: torch.device) -> GroupStore:
        """Make the store of a group whose pages are on the device: resident layers, by page."""
        (layout,), size = lay_out([group], num_pages)
        pool = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls.on_host(group, layout, pool, num_pages, device)

    def slot_views(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as ``[slots, heads_per_lane, unit, D]`` for ``attend``; twice the
        same rows where the group has one plane.

        Sparse layers view the device buffer, slot ``lane row * (C + T) + slot``; dense layers
        view their pages, slot = host page.
        """
        if self.group.residency == "sparse":
            flat = self.buffer[index].flatten(0, 1)
        else:
            flat = self.entries[:, index, 0, 0]
        return flat[:, :, 0], flat[:, :, -1]

    def ring_views(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the ring as ``[max_requests, lane_heads, T, heads_per_lane, unit, D]``."""
        group = self.group
        ring = self.buffer[index, :, group.buffer_slots :].unflatten(0, (-1, group.lane_heads))
        return ring[:, :, :, :, 0], ring[:, :, :, :, -1]

    def lanes_of(self, slot: int) -> slice:
        """Lane rows of a request slot."""
        heads = self.group.lane_heads
        return slice(slot * heads, (slot + 1) * heads)

    def forget_counts(self, slot: int) -> None:
        """Let the next request of a slot begin to count at 0. Can be called again."""
        lanes = self.lanes_of(slot)
        self.before[:, lanes] = self.counters[:, lanes]

    def counts(self, slots: Sequence[int] | None = None) -> list[list[int]]:
        """Hits and misses of each layer. Synchronizes.

        Args:
            slots: count for their requests since these began; None for all that was ever done.
        """
        counted = self.counters
        if slots is not None:
            rows = range(self.group.max_lanes)
            lanes = [row for slot in slots for row in rows[self.lanes_of(slot)]]
            counted = (counted - self.before)[:, lanes]
        found: list[list[int]] = counted.sum(1).tolist()
        return found

    def poison_pages(self, pages: list[int]) -> None:
        """Fill the entries of freed pages with NaN, packed rows with bytes that decode to it."""
        floating = self.entries.dtype.is_floating_point
        self.entries[pages] = float("nan") if floating else POISON

    def poison_slot(self, slot: int) -> None:
        """Fill buffer and ring of a request slot with NaN."""
        if self.buffer.numel():
            self.buffer[:, self.lanes_of(slot)].view(torch.uint8).fill_(POISON)

    @property
    def metadata_bytes(self) -> int:
        """Maps, order and scratch."""
        maps = (self.unit_slot, self.slot_unit, self.order, self.state, self.stamp)
        return sum(tensor.nbytes for tensor in (*maps, self.counters, self.before))
