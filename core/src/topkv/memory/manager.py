"""Memory of both tiers: the host pool, and per group device buffers, maps and representations.

All of it is allocated once, for ``max_requests`` and ``max_tokens``. ``topkv.requests.requests``
knows which request holds which page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from topkv.config import LoweredConfig
from topkv.errors import undone_by
from topkv.hooks.algorithm import AlgorithmSpec
from topkv.kv.engine_pages import EngineKVPool
from topkv.kv.host_pool import HostKVPool
from topkv.kv.store import GroupStore
from topkv.memory.representations import RepresentationPools
from topkv.types import GroupShape, LayerView, StepTensors


class SparseKVCacheManager:
    """Host pool, device buffers, maps and representations of all groups.

    Args:
        config: a lowered configuration.
        specs: the algorithm's spec of each group, None for dense groups.
        device: where buffers are; ``meta`` gives tensors that have shapes and take no memory.
        host_pool: class of the host pool, where pages are not an engine's.
        keeps_state: the eviction policy keeps a number for each slot.

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
        host_pool: type[HostKVPool] = HostKVPool,
        keeps_state: bool = False,
    ) -> None:
        self.config, self.device = config, device
        self.groups: list[GroupShape] = [group.shape for group in config.groups]
        on_host = [group for group in self.groups if group.residency != "resident"]
        pool = EngineKVPool if config.pages == "engine" else host_pool
        self.host = pool(on_host, config.num_pages, device, config.host_file)
        with undone_by(self.close):
            self._allocate(specs, keeps_state)

    def _allocate(self, specs: Sequence[AlgorithmSpec | None], keeps_state: bool) -> None:
        config, device, layouts = self.config, self.device, iter(self.host.layouts)
        self.stores = [
            GroupStore.on_device(group.shape, config.num_pages, device)
            if group.shape.residency == "resident"
            else GroupStore.on_host(
                *(group.shape, next(layouts), self.host.bytes, config.num_pages),
                *(device, keeps_state, group.host),
            )
            for group in config.groups
        ]
        self.representations = [
            RepresentationPools(
                group.selected_as,
                spec.representations if spec else (),
                config.num_pages,
                device,
                group.selecting,
            )
            for group, spec in zip(config.groups, specs, strict=True)
        ]

    def layer_views(self, index: int, step: StepTensors) -> list[tuple[LayerView, LayerView]]:
        """Return two views of each layer of a group: for transfer and backend, and for algorithm.

        They are one, unless a stage regrains: then the algorithm's is in tokens.
        """
        store, pools = self.stores[index], self.representations[index]
        group, views = self.config.groups[index], []
        for place, layer in enumerate(store.group.layers):
            rings, held = store.ring_views(place), store.unit_slot[place]
            own = pools.of_layer(layer)
            view = selecting = LayerView(layer, place, store.group, step, *rings, own, held)
            if group.regrained:
                none = view.ring_k[:, :, :0, :, :1]
                selecting = evolve(view, group=group.selected_as, ring_k=none, ring_v=none)
            views.append((view, selecting))
        return views

    # Tensors that are keyed by page, and tensors that are keyed by slot.

    def copy_page(self, source: int, target: int) -> None:
        """Copy the entries and representations of a page."""
        self.synchronize()
        for store, pools in zip(self.stores, self.representations, strict=True):
            store.entries[target] = store.entries[source]
            pools.copy_page(source, target)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages that nobody will read again with NaN, if ``poison`` is set."""
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
        """Reset all that is keyed by a slot, and fill it with NaN if ``poison`` is set."""
        for store, pools in zip(self.stores, self.representations, strict=True):
            pools.reset_slot(slot)
            store.forget_counts(slot)
            if self.config.poison:
                store.poison_slot(slot)

    def synchronize(self) -> None:
        """Wait for the device: host and device are about to touch the same bytes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Unregister the host pool, when the device has done with it. Idempotent."""
        self.synchronize()
        self.host.close()
