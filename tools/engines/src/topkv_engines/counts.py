"""Counts of a worker since its last report: for metrics."""

from __future__ import annotations

import time

import torch

from topkv import SparseCoordinator
from topkv.report import count_occupancy
from topkv_engines.requests import Requests

EVERY = 1.0
"""Seconds between two looks at the counts of the device."""

COUNTERS = {
    "hits": "Selected units that topkv found on the device.",
    "misses": "Selected units that topkv loaded from host memory.",
    "loaded_bytes": "Bytes that topkv loaded from host memory.",
    "stall_seconds": "Seconds that steps waited for those loads, if the observer stalls is on.",
}
GAUGES = {
    "pages": "Pages of topkv's host pool.",
    "used_pages": "Pages of topkv's host pool that requests hold.",
}
"""Metrics that an engine shows, and their texts."""


class Look:
    """Hits and misses of a coordinator up to now, on their way from the device.

    The host runs ahead of a device that reads prompts: if it waited for these numbers, it would
    wait for all that it has queued.

    Args:
        coordinator: whose hits and misses are copied, behind the work that is queued.
    """

    def __init__(self, coordinator: SparseCoordinator) -> None:
        stores, device = coordinator.manager.stores, coordinator.config.device
        self._sizes = [store.group.host_entry_bytes for store in stores]
        counted = torch.stack([store.counters.sum((0, 1)) for store in stores])
        self._counted = counted.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record()

    @property
    def ready(self) -> bool:
        """The numbers have come. Waits for nothing."""
        return self._copied is None or self._copied.query()

    def read(self) -> dict[str, float]:
        """Return hits, misses and loaded bytes. Waits until the numbers have come."""
        if self._copied is not None:
            self._copied.synchronize()
        counted: list[list[int]] = self._counted.tolist()
        hits, misses = map(sum, zip(*counted, strict=True))
        loaded = sum(count * size for (_, count), size in zip(counted, self._sizes, strict=True))
        return {"hits": hits, "misses": misses, "loaded_bytes": loaded}


class Counts:
    """Counts of one coordinator.

    Args:
        requests: that the coordinator serves.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests, self._reported = requests, -EVERY
        self._look: Look | None = None
        self._before: dict[str, float] = {}
        self._begin: dict[str, float] = {}

    def reset(self) -> None:
        """Forget what was counted while the engine was warmed up, with no request."""
        self.take()
        self._begin = self._before

    def total(self) -> dict[str, float]:
        """Return hits, misses and loaded bytes of all requests so far. Waits for the device."""
        found = Look(self._requests.coordinator).read()
        return {name: value - self._begin.get(name, 0) for name, value in found.items()}

    def take(self) -> dict[str, float] | None:
        """Return counts since the last report, and how many pages there are and are held.

        While there are requests, None asks the caller to come again: it is too early to look, or
        the numbers are still on their way. The call waits for the device when no request is left,
        and in each report where the observer ``stalls`` is configured.
        """
        coordinator, held = self._requests.coordinator, bool(self._requests.held)
        now = time.monotonic()
        if not held or (self._look is None and now >= self._reported + EVERY):
            self._look, self._reported = Look(coordinator), now
        if self._look is None or (held and not self._look.ready):
            return None
        stalls = coordinator.observers.counts.get("stalls", dict)  # milliseconds by layer
        total = self._look.read() | {"stall_seconds": sum(stalls().values()) / 1e3}
        since = {name: value - self._before.get(name, 0) for name, value in total.items()}
        self._look, self._before = None, total
        pages = count_occupancy(coordinator.requests)
        return {**since, "pages": pages.pages, "used_pages": pages.used_pages}
