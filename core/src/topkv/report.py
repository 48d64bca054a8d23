"""What topkv holds and has moved, counted from tensors."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from topkv.kv.manager import SparseKVCacheManager


@frozen
class MemoryReport:
    """Bytes that are allocated.

    Attributes:
        buffer: device slots of sparse layers, LRU buffers and rings.
        resident: pages of resident layers on the device.
        representation: representation pools.
        metadata: maps, orders, page tables.
        host: the host pool.
        host_used: leased pages of it.
    """

    buffer: int
    resident: int
    representation: int
    metadata: int
    host: int
    host_used: int

    @property
    def device_kv(self) -> int:
        """All keys and values on the device."""
        return self.buffer + self.resident


@frozen
class TransferReport:
    """What ``plan`` has seen.

    Attributes:
        hits, misses: units found in buffer or ring, and units that had to be loaded.
        loaded_bytes: bytes that crossed the link for the misses.
        extra: tokens attended beyond the selections, in closed units of which regranulation took
            all for some of their tokens; of every lane and layer.
    """

    hits: int
    misses: int
    loaded_bytes: int
    extra: int = 0

    @property
    def hit_rate(self) -> float:
        total = self.hits + self.misses
        return self.hits / total if total else 0.0


def memory_report(manager: SparseKVCacheManager) -> MemoryReport:
    table = manager.uploader.step.page_table
    resident = [store for store in manager.stores if store.group.residency == "resident"]
    return MemoryReport(
        buffer=sum(store.buffer_bytes for store in manager.stores),
        resident=sum(store.pool.numel() for store in resident),
        representation=sum(pools.bytes for pools in manager.representations),
        metadata=sum(store.metadata_bytes for store in manager.stores)
        + table.numel() * table.element_size(),
        host=manager.host.size,
        host_used=manager.host.size * manager.host.used // max(1, manager.num_pages),
    )


def transfer_report(manager: SparseKVCacheManager, slots: Sequence[int]) -> TransferReport:
    hits = misses = loaded = extra = 0
    for store in manager.stores:
        if store.group.residency != "sparse":
            continue
        for slot in slots:
            counts = store.counters[:, store.rows_of(slot)].sum((0, 1)).tolist()
            hits += int(counts[0])
            misses += int(counts[1])
            loaded += int(counts[1]) * store.group.entry_bytes
            extra += int(store.extra[:, store.rows_of(slot)].sum())
    return TransferReport(hits, misses, loaded, extra)
