"""A group of layers with a transfer engine and nothing above it: known bytes, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.hooks.eviction import EvictionSetup
from topkv.hooks.transfer import TransferSetup
from topkv.kv.host_pool import POISON, entry_view
from topkv.kv.layout import lay_out
from topkv.kv.store import GroupStore
from topkv.transfer.eviction import LeastRecentlyUsed
from topkv.types import GroupShape, LayerView, Plan, StepTensors
from topkv_testing.models.host_formats import coding, host_of

SENTINEL = -77
"""Value in every output of a plan before the call."""

PLAN = ("slots", "count", "miss_hosts", "miss_slots", "misses")
MAPS = ("unit_slot", "slot_unit", "order", "counters")

Make = Callable[..., Any]


@frozen
class Row:
    """One row of a decode batch as the step tensors have it; a padded one by default.

    Attributes:
        slot: request slot, -1 for padding.
        length: tokens, those of this step included.
        high: the largest length that the ring has seen.
        appended, resident: as in ``StepTensors``.
        limit: selectable units; those behind which the row's new tokens stand where None.
    """

    slot: int = -1
    length: int = 0
    high: int = 0
    appended: int = 0
    resident: bool = False
    limit: int | None = None

    def selectable(self, unit: int) -> int:
        """``limit``, or what holds where it is None."""
        if self.limit is not None:
            return self.limit
        return max(0, (self.length - max(self.appended, 1)) // unit)


def group_shape(
    *,
    unit: int = 2,
    select: int = 4,
    slots: int = 5,
    ring: int = 2,
    lane_heads: int = 2,
    heads_per_lane: int = 1,
    dim: int = 4,
    dtype: torch.dtype = torch.float32,
    requests: int = 3,
    units: int = 24,
    page_units: int = 4,
    layers: int = 2,
    residency: str = "sparse",
    planes: int = 2,
    host_format: str = "model",
) -> GroupShape:
    """A small group; ``units`` of each request make whole pages of ``page_units``."""
    sparse = residency == "sparse"
    group = GroupShape(
        layers=tuple(range(layers)),
        unit=unit,
        lane_heads=lane_heads,
        heads_per_lane=heads_per_lane,
        head_dim=dim,
        dtype=dtype,
        page_tokens=page_units * unit,
        max_requests=requests,
        max_units=units,
        select=select if sparse else 0,
        buffer_slots=slots if sparse else 0,
        ring_slots=ring if sparse else 0,
        residency=residency,
        planes=planes,
    )
    if host_format == "model":
        return group
    return evolve(group, coded_bytes=coding(group).coded_bytes())


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU: NaN equals itself here."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def random_tokens(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random bits of any dtype, NaN and subnormal numbers included."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


class TransferBench:
    """One group, its store, and an engine; pages in random order, page 0 nobody's.

    The host pool holds random bytes, the device buffer NaN.

    Args:
        make: factory of the engine, ``make(setup, impl)``.
        group: the group.
        device: where the buffer is; the host pool is pinned when that is a GPU.
        impl: ``"reference"`` or ``"triton"``.
        seed: of page table and bytes.
        pool: uint8 memory to take for the host pool, at least as large as it needs.
        max_queries: most tokens that a row appends.
    """

    def __init__(
        self,
        make: Make,
        group: GroupShape,
        device: torch.device,
        impl: str,
        seed: int = 0,
        pool: Tensor | None = None,
        max_queries: int = 1,
    ) -> None:
        self.group, self.device, self.watched = group, device, True
        self.generator = torch.Generator().manual_seed(seed)
        pages = -(-group.max_units // group.units_per_page)
        self.num_pages = 1 + group.max_requests * pages
        self.store = self._store(pool, impl)
        order = 1 + torch.randperm(self.num_pages - 1, generator=self.generator)
        self.pages = order.view(group.max_requests, pages)
        self._page_lists: list[list[int]] = self.pages.tolist()
        self._packed = torch.zeros((6, group.max_requests), dtype=torch.int32, device=device)
        slots, lengths, high, appended, resident, self.limit = self._packed
        table = self.pages.to(device, torch.int32)
        self.step = StepTensors(slots, lengths, high, appended, resident, table)
        rings = (
            [self.store.ring_views(i) for i in range(len(group.layers))]
            if group.residency == "sparse"
            else [(torch.zeros(0, device=device),) * 2] * len(group.layers)
        )
        self.views = [
            LayerView(layer, index, group, self.step, *rings[index])
            for index, layer in enumerate(group.layers)
        ]
        policy: Any = LeastRecentlyUsed(EvictionSetup(device))
        self.engine = make(TransferSetup(self.store, self.views, policy, max_queries), impl)
        lanes = group.max_requests * group.lane_heads
        wide, flat = (lanes, max(1, group.select)), (lanes,)
        self._plan = {
            name: torch.full(shape, SENTINEL, dtype=torch.int32, device=device)
            for name, shape in zip(PLAN, (wide, flat, wide, wide, flat), strict=True)
        }
        self.plan = Plan(**self._plan)

    def _store(self, pool: Tensor | None, impl: str) -> GroupStore:
        group = self.group
        if group.residency == "resident":
            store = GroupStore.on_device(group, self.num_pages, self.device)
            store.pool.copy_(self._random_bytes(store.pool.numel()))
            return store
        (strides,), size = lay_out([group], self.num_pages)
        if pool is None:
            pool = self._random_bytes(size)
            if self.device.type == "cuda":
                pool = pool.pin_memory()
        store = GroupStore.on_host(
            *(group, strides, pool, self.num_pages, self.device),
            keeps_state=True,
            host=host_of(group, impl),
        )
        store.buffer.view(torch.uint8).fill_(POISON)
        return store

    def _random_bytes(self, size: int) -> Tensor:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)

    def set_pages(self, pages: Tensor) -> None:
        """Replace the page table by int64 ``[requests, pages]``."""
        self.pages, self._page_lists = pages, pages.tolist()
        self.step.page_table.copy_(pages)

    def put(self, rows: Sequence[Row]) -> None:
        """Upload the rows of a step and narrow the step tensors to them."""
        unit = self.group.unit
        values = [
            (
                row.slot,
                row.length,
                row.high,
                row.appended,
                row.resident,
                row.selectable(unit),
            )
            for row in rows
        ]
        packed = self._packed[:, : len(rows)]
        packed.copy_(torch.tensor(values, dtype=torch.int32).T)
        step = self.step
        step.slots, step.lengths, step.high, step.appended, step.resident, self.limit = packed
        lanes = len(rows) * self.group.lane_heads
        self.plan = Plan(**{name: tensor[:lanes] for name, tensor in self._plan.items()})

    def run(self, layer: int, ids: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """Plan and load one layer for the rows of ``put``; returns the plan as lists.

        Raises:
            AssertionError: the plan of lanes that are not in the batch was written, or misses
                are listed that do not exist.
        """
        for tensor in self._plan.values():
            tensor.fill_(SENTINEL)
        selection = torch.tensor(ids, dtype=torch.int32, device=self.device)
        self.engine.plan(self.views[layer], selection, self.limit, self.plan)
        lanes, found = len(ids), {name: tensor.cpu() for name, tensor in self._plan.items()}
        for name, tensor in found.items():
            assert (tensor[lanes:] == SENTINEL).all(), f"plan.{name} written behind lane {lanes}"
        self._check_misses(*(found[name][:lanes] for name in PLAN[2:]))
        self.engine.load(self.views[layer], self.plan)
        return {name: tensor[:lanes].tolist() for name, tensor in found.items()}

    def _check_misses(self, hosts: Tensor, slots: Tensor, misses: Tensor) -> None:
        """Assert that misses are inside pool and buffer, with -1 behind them: else ``load`` could
        write anywhere, and end the process."""
        listed = torch.arange(slots.shape[1]) < misses[:, None]
        for what, found, most in (
            ("miss_hosts", hosts, self.num_pages * self.group.units_per_page),
            ("miss_slots", slots, self.group.buffer_slots),
        ):
            right = torch.where(listed, (found >= 0) & (found < most), found == -1)
            assert right.all(), (
                f"plan.{what} must hold ids below {most}, and -1 behind the {misses.tolist()} "
                f"misses, got {found.tolist()}"
            )

    def host_id(self, slot: int, unit: int) -> int:
        """Place of a unit of a request in the host pool."""
        per_page = self.group.units_per_page
        return self._page_lists[slot][unit // per_page] * per_page + unit % per_page

    def finish(self) -> None:
        """Wait for the device. Kernels write to host memory, which torch reads without waiting."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def host_tokens(self, slot: int) -> Tensor:
        """Tokens in the pages of a request, ``[L, tokens, Hkv, planes, D]``."""
        group = self.group
        self.finish()
        found = self.store.entries[self.pages[slot].to(self.store.entries.device)].cpu()
        host = self.store.host
        tokens = host.decode(host.parts(found)).permute(1, 0, 3, 6, 2, 4, 5, 7)
        # From [L, pages, units, unit, lanes, h, planes, D].
        shape = (len(group.layers), -1, group.num_kv_heads, group.planes, group.head_dim)
        return tokens.reshape(shape)

    @contextmanager
    def touching(
        self,
        slots: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        pages_of: Sequence[int] = (),
    ) -> Iterator[None]:
        """Check that nothing changes but the rows of some slots and the pages of some slots, if
        ``watched``.

        Args:
            slots: requests whose device rows may change.
            layers: layers in which they may, all by default.
            pages_of: requests whose host pages may change.
        """
        store, group = self.store, self.group
        if not self.watched:
            yield
            return
        layers = range(len(group.layers)) if layers is None else layers
        before = {name: getattr(store, name).clone() for name in (*MAPS, "buffer")}
        pool = store.pool.clone()
        yield
        self.finish()
        for name, old in before.items():
            new = getattr(store, name)
            for slot in slots:
                for layer in layers:
                    old[layer, store.lanes_of(slot)] = new[layer, store.lanes_of(slot)]
            assert torch.equal(raw(old), raw(new)), f"{name} of somebody else was written"
        view = entry_view(pool, group, store.layout, self.num_pages)
        for slot in pages_of:
            pages = self.pages[slot].to(pool.device)
            for layer in layers:
                view[pages, layer] = store.entries[pages, layer]
        assert torch.equal(pool, store.pool), "host pages of somebody else were written"
