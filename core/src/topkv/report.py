"""Reports of memory and of transfers, counted from tensors, and of prompts that were found."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from topkv.hooks.observer import Occupancy as Occupancy
from topkv.hooks.observer import TransferReport as TransferReport
from topkv.kv.held import tensor_bytes
from topkv.kv.step import StepUploader
from topkv.kv.store import GroupStore
from topkv.memory.manager import SparseKVCacheManager
from topkv.requests.requests import Requests


@frozen
class MemoryReport:
    """Bytes that are allocated.

    Attributes:
        buffer: device slots of sparse layers, LRU buffers and rings.
        resident: pages of resident layers on the device.
        representation: representation pools.
        metadata: maps, orders, page tables.
        workspace: selections, plans and tables of a step, last queries of prompts, and the
            scratch of plugins.
        host: the host pool.
        host_used: leased pages of it.
        left: device bytes of layers that an engine leaves to the model itself; a
            coordinator knows of none.
    """

    buffer: int
    resident: int
    representation: int
    metadata: int
    workspace: int
    host: int
    host_used: int
    left: int = 0

    @property
    def device_kv(self) -> int:
        """Bytes of all keys and values on the device."""
        return self.buffer + self.resident

    @property
    def device(self) -> int:
        """All bytes on the device."""
        ours = self.device_kv + self.representation + self.metadata + self.workspace
        return ours + self.left


def count_memory(
    manager: SparseKVCacheManager, uploader: StepUploader, others: Sequence[object]
) -> MemoryReport:
    """Count the bytes of both tiers.

    Args:
        manager: its pools, buffers and maps.
        uploader: has the step tensors.
        others: whatever else holds tensors on the device.
    """
    stores, pools, host = manager.stores, manager.representations, manager.host
    resident = [s.pool.nbytes for s in stores if s.group.residency == "resident"]
    return MemoryReport(
        buffer=sum(store.buffer.nbytes for store in stores),
        resident=sum(resident),
        representation=sum(pool.bytes for pool in pools),
        metadata=sum(store.metadata_bytes for store in stores) + uploader.step.page_table.nbytes,
        workspace=tensor_bytes(others, without=[stores, pools, uploader.step, uploader.staging]),
        host=host.size,
        host_used=host.size * host.used // max(1, host.num_pages),
    )


def count_transfers(
    stores: Sequence[GroupStore], slots: Sequence[int] | None = None
) -> TransferReport:
    """Count hits, misses and loaded bytes. Synchronizes.

    Args:
        stores: stores of all groups.
        slots: requests, counted since they began; None for all that there ever were.
    """
    layers = {}
    for store in stores:
        if store.group.residency == "sparse":
            size = store.group.host_entry_bytes
            counted = zip(store.group.layers, store.counts(slots), strict=True)
            for layer, (hits, misses) in counted:
                layers[layer] = TransferReport(hits, misses, misses * size)
    each = layers.values()
    return TransferReport(
        hits=sum(layer.hits for layer in each),
        misses=sum(layer.misses for layer in each),
        loaded_bytes=sum(layer.loaded_bytes for layer in each),
        layers=dict(sorted(layers.items())),
    )


def count_occupancy(requests: Requests) -> Occupancy:
    """Count pages and slots that are held. Asks the host alone; any thread may, at any time."""
    host, slots = requests.manager.host, len(requests.active)
    return Occupancy(host.num_pages - 1, host.used, slots, slots - requests.free)
