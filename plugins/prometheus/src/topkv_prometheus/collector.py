"""What Prometheus is shown: a collector in the default registry of ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock
from weakref import WeakSet

from attrs import define
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topkv.report import Occupancy, TransferReport

FORWARDS = {
    "forwards": "Forwards that have ended",
    "prompt_tokens": "Tokens of prompts that were read",
    "decoded_tokens": "Decode rows that were computed, padded ones aside",
}
"""Counters by coordinator: attributes of ``Counts``."""

LAYERS = {
    "hits": "Selected units that were found on the device",
    "misses": "Selected units that were loaded from the host",
    "loaded_bytes": "Bytes that were loaded from the host",
}
"""Counters by coordinator and layer: attributes of ``topkv.report.TransferReport``."""

STALLS = "Seconds that steps waited for loads; shown where stall_times is on"

HELD = {
    "pages": "Host pages that requests can hold",
    "used_pages": "Host pages that requests hold",
    "slots": "Request slots",
    "used_slots": "Request slots that hold a request",
}
"""Gauges by coordinator: attributes of ``topkv.report.Occupancy``."""


@define(eq=False)
class Counts:
    """What one observer has gathered.

    Attributes:
        coordinator: number of its coordinator within the process.
        transfers: hits, misses and bytes of all requests, when they were looked at last.
        forwards: forwards that ended.
        prompt_tokens: prompt tokens of those.
        decoded_tokens: decode rows of those, without padded ones.
        occupancy: says how many pages and slots are held now; None before the first forward.
    """

    coordinator: int
    transfers: TransferReport
    forwards: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    occupancy: Callable[[], Occupancy] | None = None


class CountsCollector(Collector):
    """Reads the counts of all observers when it is scraped; those of one that is gone vanish.

    Scrapes come in threads of their own. They find numbers that the threads which run forwards
    have left, and never ask the device: that would break the capture of a CUDA graph.
    """

    def __init__(self) -> None:
        self._watched: WeakSet[Counts] = WeakSet()
        self._lock = Lock()  # a set must not grow while it is read

    def watch(self, counts: Counts) -> None:
        """Show counts for as long as somebody else holds them."""
        with self._lock:
            self._watched.add(counts)

    def collect(self) -> Iterator[Metric]:
        """The families of metrics, each with the samples of all observers."""
        with self._lock:
            watched = sorted(self._watched, key=lambda each: each.coordinator)
        for name, text in FORWARDS.items():
            counter = CounterMetricFamily(f"topkv_{name}", text, labels=["coordinator"])
            for each in watched:
                counter.add_metric([str(each.coordinator)], getattr(each, name))
            yield counter
        counts = [
            ([str(each.coordinator), str(layer)], report)
            for each in watched
            for layer, report in each.transfers.layers.items()
        ]
        for name, text in LAYERS.items():
            counter = CounterMetricFamily(f"topkv_{name}", text, labels=["coordinator", "layer"])
            for labels, report in counts:
                counter.add_metric(labels, getattr(report, name))
            yield counter
        timed = [each for each in counts if each[1].stall_ms is not None]
        counter = CounterMetricFamily(
            "topkv_stall_seconds", STALLS, labels=["coordinator", "layer"]
        )
        for labels, report in timed:
            counter.add_metric(labels, report.stall_ms / 1e3)
        yield counter
        held = [([str(each.coordinator)], each.occupancy()) for each in watched if each.occupancy]
        for name, text in HELD.items():
            gauge = GaugeMetricFamily(f"topkv_{name}", text, labels=["coordinator"])
            for labels, occupancy in held:
                gauge.add_metric(labels, getattr(occupancy, name))
            yield gauge


COLLECTOR = CountsCollector()
REGISTRY.register(COLLECTOR)
