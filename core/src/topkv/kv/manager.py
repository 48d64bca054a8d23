"""SparseKVCacheManager: the memory of all groups, on both tiers, and the pages of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from topkv.errors import DeviceMemoryError, HostMemoryError, RequestError
from topkv.kv.host_pool import HostKVPool
from topkv.kv.layout import lay_out
from topkv.kv.representations import RepresentationPools
from topkv.kv.step import StepUploader
from topkv.kv.store import GroupStore
from topkv.requests import RequestTracker
from topkv.types import AlgorithmSpec, GroupShape, LayerView


class SparseKVCacheManager:
    """Host pool, device buffers, maps and representations.

    Args:
        config: a lowered configuration.
        specs: the algorithm's spec of each group, None for dense groups.

    Raises:
        HostMemoryError, DeviceMemoryError: a limit would be exceeded; nothing was allocated.
    """

    def __init__(self, config: Any, specs: Sequence[AlgorithmSpec | None]) -> None:
        self.config = config
        self.device: torch.device = config.device
        self.groups: list[GroupShape] = [group.shape for group in config.groups]
        self.num_pages: int = config.num_pages
        self.page_tokens: int = config.page_tokens
        self._specs = specs
        self._refuse_what_exceeds_limits()
        on_host = [group for group in self.groups if group.residency != "resident"]
        self.host = HostKVPool(on_host, self.num_pages, config.host_layout, self.device)
        self.tracker = RequestTracker(
            config.max_requests, len(self.groups), config.resident_fast_path
        )
        limits = [
            (group.unit, bool(spec and spec.tail == "selectable"))
            for group, spec in zip(self.groups, specs, strict=True)
        ]
        max_pages = config.max_request_tokens // config.page_tokens
        self.uploader = StepUploader(
            self.tracker, limits, config.max_requests, max_pages, self.device
        )
        try:
            self.stores = self._make_stores(self.device)
            self.representations = self._make_representations(self.device)
        except torch.OutOfMemoryError as error:
            self.host.close()
            raise DeviceMemoryError(
                f"the device buffers do not fit: {error}; lower buffer, max_requests or max_tokens"
            ) from error

    def _make_stores(self, device: torch.device) -> list[GroupStore]:
        places = iter(zip(self.host.layouts, self.host.entries, strict=True))
        stores = []
        for group in self.groups:
            if group.residency == "resident":
                stores.append(GroupStore.on_device(group, self.num_pages, device))
            else:
                layout, entries = next(places)
                stores.append(GroupStore.on_host(group, layout, self.host.bytes, entries, device))
        return stores

    def _make_representations(self, device: torch.device) -> list[RepresentationPools]:
        indexer, made = self.config.model.indexer, []
        for group, spec in zip(self.config.groups, self._specs, strict=True):
            layers = [
                layer
                for layer in group.shape.layers
                if indexer is None or indexer.selects_for(layer)
            ]
            kept = spec.representations if spec else ()
            made.append(RepresentationPools(group.seen, kept, self.num_pages, device, layers))
        return made

    def _refuse_what_exceeds_limits(self) -> None:
        """Count bytes on the meta device, where tensors have shapes and take no memory."""
        on_host = [group for group in self.groups if group.residency != "resident"]
        layouts, host_bytes = lay_out(on_host, self.config.host_layout, self.num_pages)
        limit = self.config.host_memory
        if limit is not None and host_bytes > limit:
            raise HostMemoryError(
                f"the host pool needs {host_bytes} bytes and host_memory allows {limit}; "
                "lower max_tokens or raise host_memory"
            )
        meta = torch.device("meta")
        empty = torch.empty(0, device=meta)
        stores = [
            GroupStore.on_device(group, self.num_pages, meta)
            if group.residency == "resident"
            else GroupStore.on_host(group, layouts[on_host.index(group)], empty, empty, meta)
            for group in self.groups
        ]
        needed = sum(store.buffer_bytes + store.metadata_bytes for store in stores)
        needed += sum(s.pool.numel() for s in stores if s.group.residency == "resident")
        needed += sum(pools.bytes for pools in self._make_representations(meta))
        limit = self.config.device_memory
        if limit is not None and needed > limit:
            raise DeviceMemoryError(
                f"buffers, maps, resident layers and representations need {needed} bytes and "
                f"device_memory allows {limit}; lower buffer, max_requests or max_tokens, take a "
                "coarser unit, or raise device_memory"
            )

    def layer_views(self, index: int) -> list[LayerView]:
        """The views of the layers of a group, in order."""
        store, pools = self.stores[index], self.representations[index]
        views = []
        for place, layer in enumerate(store.group.layers):
            ring_k, ring_v = store.ring_views(place)
            step = self.uploader.step
            views.append(
                LayerView(layer, place, store.group, step, ring_k, ring_v, pools.of_layer(layer))
            )
        return views

    def seen_views(self, index: int, views: list[LayerView]) -> list[LayerView]:
        """What the algorithm of a group is given: ``views`` themselves, unless it selects tokens
        of larger units. Such views show no ring."""
        group = self.config.groups[index]
        if not group.regranulated:
            return views
        heads, seen = group.shape.heads_per_lane, group.seen
        shape = (seen.max_requests, seen.lane_heads, 0, heads, seen.unit, seen.head_dim)
        none = torch.empty(shape, dtype=seen.dtype, device=self.device)
        return [evolve(view, group=seen, ring_k=none, ring_v=none) for view in views]

    # Pages of requests.

    def pages_missing(self, slot: int, length: int) -> int:
        """Pages that a request lacks to hold ``length`` tokens."""
        if length > self.config.max_request_tokens:
            raise HostMemoryError(
                f"a request of {length} tokens exceeds max_request_tokens = "
                f"{self.config.max_request_tokens}; shorten the prompt or raise it"
            )
        needed = -(-length // self.page_tokens)
        return max(0, needed - len(self.tracker.pages[slot]))

    def without_page(self, slots: np.ndarray) -> np.ndarray:
        """Those of the slots whose next token has no page, or one that others share."""
        index = self.tracker.length[slots] // self.page_tokens
        table = self.uploader.host_pages
        inside = index < table.shape[1]
        page = np.where(inside, table[slots, np.minimum(index, table.shape[1] - 1)], 0)
        in_need: np.ndarray = slots[(page == 0) | (self.host.references[page] > 1)]
        return in_need

    def copies_needed(self, places: Sequence[tuple[int, int]]) -> int:
        """Pages that ``own_page`` is going to lease for all of these ``(slot, index)``."""
        held = self.tracker.pages
        writers = Counter(held[slot][at] for slot, at in places if at < len(held[slot]))
        references = self.host.references
        return sum(min(count, int(references[page]) - 1) for page, count in writers.items())

    def lease(self, needs: Sequence[tuple[int, int]], spare: int = 0) -> None:
        """Give each slot the pages for its length: ``(slot, length)``, all or none.

        With ``spare``, so many pages are free afterwards, or nothing has changed.
        """
        missing = [(slot, self.pages_missing(slot, length)) for slot, length in needs]
        total = sum(count for _, count in missing)
        pages = self.host.lease(total + spare)
        self.host.release(pages[total:])
        for slot, count in missing:
            if count:
                held = self.tracker.pages[slot]
                self.uploader.write_page_row(slot, len(held), pages[:count])
                held += pages[:count]
                pages = pages[count:]

    def shrink(self, slot: int, length: int) -> None:
        """Release the pages behind ``length``."""
        held = self.tracker.pages[slot]
        keep = -(-length // self.page_tokens)
        self.release(held[keep:])
        del held[keep:]
        self.uploader.write_page_row(slot, keep, [])

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page."""
        self.poison(pages)
        self.host.release(pages)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill those of a request's pages that nobody else holds with NaN, where asked to."""
        alone = [page for page in pages if not self.host.shared(page)]
        if alone and self.config.poison:
            self._synchronize()
            for store, pools in zip(self.stores, self.representations, strict=True):
                store.poison_pages(alone)
                pools.poison_pages(alone)

    def own_page(self, slot: int, index: int) -> None:
        """Copy a shared page before it is written: entries and representations."""
        held = self.tracker.pages[slot]
        if index >= len(held) or not self.host.shared(held[index]):
            return
        (copy,) = self.host.lease(1)
        try:
            self._synchronize()
            for store, pools in zip(self.stores, self.representations, strict=True):
                store.entries[copy] = store.entries[held[index]]
                pools.copy_page(held[index], copy)
        except BaseException:
            self.host.release([copy])
            raise
        self.host.release([held[index]])
        held[index] = copy
        self.uploader.write_page_row(slot, index, held[index:])

    def forget_slot(self, slot: int) -> None:
        """Reset what is keyed by slot, and poison it where asked to."""
        for store, pools in zip(self.stores, self.representations, strict=True):
            pools.reset_slot(slot)
            store.extra[:, store.rows_of(slot)] = 0
            if self.config.poison:
                store.poison_rows(slot)
        self.uploader.write_page_row(slot, 0, [])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_integrity(self) -> None:
        """Counts add up on both tiers, and every map is what it claims to be. Slow; for tests.

        Raises:
            RequestError: with the first thing that is wrong.
        """
        self._synchronize()
        self.host.check_integrity(self.tracker.pages)
        for store in self.stores:
            if store.group.residency == "sparse":
                _check_maps(store)

    def close(self) -> None:
        """Unregister the host pool. Idempotent."""
        self.host.close()


def _check_maps(store: GroupStore) -> None:
    """Order is a permutation; unit -> slot and slot -> unit are inverse; no stamp is left."""
    slots = store.group.buffer_slots
    expected = torch.arange(slots, device=store.order.device).expand(store.order.shape)
    if not torch.equal(store.order.long().sort(-1).values, expected):
        raise RequestError("the eviction order of a lane is not a permutation of its slots")
    if (store.stamp != 2**31 - 1).any():
        raise RequestError("a stamp outlived its plan")
    held = store.slot_unit >= 0
    back = store.unit_slot.gather(-1, store.slot_unit.clamp(min=0).long())
    if not torch.equal(back[held].long(), expected[held]):
        raise RequestError("a slot's unit does not point back at it")
    if not torch.equal(held.sum(-1), (store.unit_slot >= 0).sum(-1)) or store.unit_slot.min() < -1:
        raise RequestError("a unit claims a slot that does not hold it")
