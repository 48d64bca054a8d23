"""Counts of a worker since its last report: for metrics."""

from __future__ import annotations

import time

from topkv.report import count_occupancy
from topkv_engines.requests import Requests

EVERY = 1.0
"""Seconds between two looks at the counts of the device, each of which waits for it."""


class Counts:
    """Counts of one coordinator.

    Args:
        requests: that the coordinator serves.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests, self._reported = requests, -EVERY
        self._before: dict[str, float] = {}

    def take(self) -> dict[str, float] | None:
        """Return counts since the last ones, and how many pages there are and are held.

        None if it is too early to look, and requests are there, so that it will be asked again.
        """
        now = time.monotonic()
        if self._requests.held and now < self._reported + EVERY:
            return None
        self._reported, coordinator = now, self._requests.coordinator
        report, held = coordinator.transfers_of(), count_occupancy(coordinator.requests)
        stalls = coordinator.observers.counts.get("stalls", dict)  # milliseconds by layer
        total = {
            "hits": report.hits,
            "misses": report.misses,
            "loaded_bytes": report.loaded_bytes,
            "stall_seconds": sum(stalls().values()) / 1e3,
        }
        since = {name: value - self._before.get(name, 0) for name, value in total.items()}
        self._before = total
        return {**since, "pages": held.pages, "used_pages": held.used_pages}
