"""What topkv holds and has moved, counted from tensors."""

from __future__ import annotations

from attrs import frozen


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
    """

    buffer: int
    resident: int
    representation: int
    metadata: int
    workspace: int
    host: int
    host_used: int

    @property
    def device_kv(self) -> int:
        """All keys and values on the device."""
        return self.buffer + self.resident

    @property
    def device(self) -> int:
        """All that lies on the device."""
        return self.device_kv + self.representation + self.metadata + self.workspace


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
        """Share of the selected units that needed no load; 0 where none was selected."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0
