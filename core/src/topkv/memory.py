"""Memory of both tiers: the host pool, and per group device buffers, maps and representations.

What is allocated here is allocated once, for ``max_requests`` and ``max_tokens``. Who holds which
page of it is the business of ``topkv.requests``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from topkv.config import LoweredConfig
from topkv.kv.held import tensor_bytes
from topkv.kv.host_pool import HostKVPool
from topkv.kv.representations import RepresentationPools
from topkv.kv.store import GroupStore
from topkv.report import MemoryReport, TransferReport
from topkv.types import AlgorithmSpec, GroupShape, LayerView, StepTensors


class SparseKVCacheManager:
    """Host pool, device buffers, maps and representations of all groups.

    Args:
        config: a lowered configuration.
        specs: the algorithm's spec of each group, None for dense groups.
        device: where buffers lie; ``meta`` gives tensors that have shapes and take no memory.

    Attributes:
        groups: the shape of each group.
        host: the host pool, which leases pages.
        stores: the tensors of each group.
        representations: the pools of each group.
    """

    def __init__(
        self,
        config: LoweredConfig,
        specs: Sequence[AlgorithmSpec | None],
        device: torch.device,
    ) -> None:
        self.config, self.device = config, device
        self.groups: list[GroupShape] = [group.shape for group in config.groups]
        on_host = [group for group in self.groups if group.residency != "resident"]
        self.host = HostKVPool(on_host, config.num_pages, config.host_layout, device)
        try:
            self._allocate(specs)
        except BaseException:
            self.close()
            raise

    def _allocate(self, specs: Sequence[AlgorithmSpec | None]) -> None:
        config, device, layouts = self.config, self.device, iter(self.host.layouts)
        self.stores = [
            GroupStore.on_device(group, config.num_pages, device)
            if group.residency == "resident"
            else GroupStore.on_host(
                group, next(layouts), self.host.bytes, config.num_pages, device
            )
            for group in self.groups
        ]
        self.representations = [
            RepresentationPools(
                group.seen,
                spec.representations if spec else (),
                config.num_pages,
                device,
                config.selecting_layers(group),
            )
            for group, spec in zip(config.groups, specs, strict=True)
        ]

    def layer_views(self, index: int, step: StepTensors) -> list[tuple[LayerView, LayerView]]:
        """Of each layer of a group what transfer and backend see, and what the algorithm sees.

        They are one, unless the algorithm selects tokens of larger units: then it sees no ring.
        """
        store, pools = self.stores[index], self.representations[index]
        group, views = self.config.groups[index], []
        for place, layer in enumerate(store.group.layers):
            ring_k, ring_v = store.ring_views(place)
            view = LayerView(
                layer, place, store.group, step, ring_k, ring_v, pools.of_layer(layer)
            )
            seen = view
            if group.regranulated:
                none = ring_k[:, :, :0, :, :1]
                seen = evolve(view, group=group.seen, ring_k=none, ring_v=none)
            views.append((view, seen))
        return views

    # What is keyed by page, and what is keyed by slot.

    def copy_page(self, source: int, target: int) -> None:
        """Copy the entries and representations of a page."""
        self.synchronize()
        for store, pools in zip(self.stores, self.representations, strict=True):
            store.entries[target] = store.entries[source]
            pools.copy_page(source, target)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages that nobody will read again with NaN, where asked to."""
        if pages and self.config.poison:
            self.synchronize()
            for store, pools in zip(self.stores, self.representations, strict=True):
                store.poison_pages(list(pages))
                pools.poison_pages(list(pages))

    def copy_slot(self, slot: int, twin: int) -> None:
        """Give a fork the representations that are keyed by slot."""
        for pools in self.representations:
            pools.copy_slot(slot, twin)

    def forget_slot(self, slot: int) -> None:
        """Reset what is keyed by slot, and poison it where asked to."""
        for store, pools in zip(self.stores, self.representations, strict=True):
            pools.reset_slot(slot)
            store.extra[:, store.rows_of(slot)] = 0
            if self.config.poison:
                store.poison_rows(slot)

    def synchronize(self) -> None:
        """Wait for the device: host and device are about to touch the same bytes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self, step: StepTensors, others: Sequence[object]) -> MemoryReport:
        """Count bytes.

        Args:
            step: the step tensors.
            others: whatever else holds tensors on the device.
        """
        table = step.page_table
        resident = [s.pool.nbytes for s in self.stores if s.group.residency == "resident"]
        known = [*self.stores, *self.representations]
        return MemoryReport(
            buffer=sum(store.buffer.nbytes for store in self.stores),
            resident=sum(resident),
            representation=sum(pools.bytes for pools in self.representations),
            metadata=sum(store.metadata_bytes for store in self.stores) + table.nbytes,
            workspace=tensor_bytes(others, without=[known, step]),
            host=self.host.size,
            host_used=self.host.size * self.host.used // max(1, self.host.num_pages),
        )

    def transfers(self, slots: Sequence[int]) -> TransferReport:
        """Count what was loaded for requests since they began. Synchronizes."""
        hits = misses = loaded = extra = 0
        for store in self.stores:
            if store.group.residency != "sparse":
                continue
            for slot in slots:
                counts = store.counters[:, store.rows_of(slot)].sum((0, 1)).tolist()
                hits += int(counts[0])
                misses += int(counts[1])
                loaded += int(counts[1]) * store.group.entry_bytes
                extra += int(store.extra[:, store.rows_of(slot)].sum())
        return TransferReport(hits, misses, loaded, extra)

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Counts add up on both tiers, and every map is what it claims to be. Slow; for tests.

        Args:
            holders: the pages of each request.

        Raises:
            RequestError: with the first thing that is wrong.
        """
        self.synchronize()
        self.host.check_integrity(holders)
        for store in self.stores:
            if store.group.residency == "sparse":
                store.check_maps()

    def close(self) -> None:
        """Unregister the host pool. Idempotent."""
        self.host.close()
