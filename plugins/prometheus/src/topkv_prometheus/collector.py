"""Collector of topkv's counts in the default registry of ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

from attrs import Factory, define
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from topkv.hooks.observer import Occupancy, TransferReport

FORWARDS = {
    "forwards": "Forwards that have ended",
    "prompt_tokens": "Tokens of prompts that were read",
    "decoded_tokens": "Decode rows that were computed, padded ones aside",
}
"""Counters by coordinator: attributes of ``Counts``."""

OF = ("coordinator",)
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

LAYERS = {
    "hits": "Selected units that were found on the device",
    "misses": "Selected units that were loaded from the host",
    "loaded_bytes": "Bytes that were loaded from the host",
}
"""Counters by coordinator and layer: attributes of ``topkv.report.TransferReport``."""

STALLS = "Seconds that steps waited for loads; shown where the observer stalls is on"

HELD = {
    "pages": "Host pages that requests can hold",
    "used_pages": "Host pages that requests hold",
    "slots": "Request slots",
    "used_slots": "Request slots that hold a request",
}
"""Gauges by coordinator: attributes of ``topkv.report.Occupancy``."""


ASKED = {
    "asked": ("topkv_prefix_asked_tokens", "Tokens of prompts that were looked for"),
    "found": ("topkv_prefix_found_tokens", "Tokens of prompts whose pages were taken over"),
    "evicted": ("topkv_prefix_evicted_pages", "Pages that were kept and given out again"),
}
"""Counters by coordinator and tenant: attributes of ``topkv_prefixes.counts.TenantCounts``."""

KEPT = {
    "kept": ("topkv_prefix_kept_pages", "Host pages that no request holds and that can be found"),
    "kept_bytes": ("topkv_prefix_kept_bytes", "Bytes of those"),
}
"""Gauges by coordinator and tenant: attributes of ``topkv_prefixes.counts.TenantCounts``."""

STORED = {
    "found": ("topkv_storage_found_tokens", "Tokens of prompts whose pages a storage had"),
    "fetched": ("topkv_storage_fetched_pages", "Pages that came from a storage"),
    "fetched_bytes": ("topkv_storage_fetched_bytes", "Bytes of those"),
    "stored": ("topkv_storage_stored_pages", "Pages that a storage took"),
    "stored_bytes": ("topkv_storage_stored_bytes", "Bytes of those"),
    "damaged": ("topkv_storage_damaged_pages", "Pages that came and were not what they should be"),
    "late": ("topkv_storage_late_prompts", "Prompts that did not wait until all pages had come"),
    "failed": ("topkv_storage_failed_calls", "Calls of a storage that raised or hung"),
    "dropped": ("topkv_storage_dropped_pages", "Pages that were to be stored and were not"),
}
"""Counters by coordinator: attributes of ``topkv_prefixes.calls.StorageCounts``."""


@define(eq=False)
class Counts:
    """Counts that one observer has gathered.

    Attributes:
        coordinator: number of its coordinator within the process.
        transfers: hits, misses and bytes of all requests, when they were looked at last.
        stalls: milliseconds that steps waited for loads, by layer, then; empty where nobody has
            timed them.
        forwards: forwards that ended.
        prompt_tokens: prompt tokens of these forwards.
        decoded_tokens: decode rows of these forwards, without padded ones.
        occupancy: says how many pages and slots are held now; None before the first forward.
        others: further counters, ``prefixes`` of topkv-prefixes among them.
    """

    coordinator: int
    transfers: TransferReport
    stalls: Mapping[int, float] = Factory(dict)
    forwards: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    occupancy: Callable[[], Occupancy] | None = None
    others: Mapping[str, Callable[[], Any]] = Factory(dict)


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
        by = {str(each.coordinator): each for each in watched}
        forwards = [([name], each) for name, each in by.items()]
        for name, text in FORWARDS.items():
            yield _family(CounterMetricFamily, f"topkv_{name}", text, OF, forwards, name)
        layers = [
            ([name, str(layer)], report)
            for name, each in by.items()
            for layer, report in each.transfers.layers.items()
        ]
        for name, text in LAYERS.items():
            labels = (*OF, "layer")
            yield _family(CounterMetricFamily, f"topkv_{name}", text, labels, layers, name)
        counter = CounterMetricFamily("topkv_stall_seconds", STALLS, labels=(*OF, "layer"))
        for name, each in by.items():
            for layer, waited in each.stalls.items():
                counter.add_metric([name, str(layer)], waited / 1e3)
        yield counter
        held = [([name], each.occupancy()) for name, each in by.items() if each.occupancy]
        for name, text in HELD.items():
            yield _family(GaugeMetricFamily, f"topkv_{name}", text, OF, held, name)
        yield from _prefixes(
            {n: each.others["prefixes"]() for n, each in by.items() if "prefixes" in each.others}
        )


def _prefixes(found: Mapping[str, Any]) -> Iterator[Metric]:
    """Families of metrics of prompts that begin like earlier ones, by coordinator."""
    tenants = [
        ([name, tenant], counts)
        for name, each in found.items()
        for tenant, counts in sorted(each.tenants.items())
    ]
    labels = (*OF, "tenant")
    for what, (name, text) in ASKED.items():
        yield _family(CounterMetricFamily, name, text, labels, tenants, what)
    for what, (name, text) in KEPT.items():
        yield _family(GaugeMetricFamily, name, text, labels, tenants, what)
    stored = [([name], each.storage) for name, each in found.items() if each.storage]
    for what, (name, text) in STORED.items():
        yield _family(CounterMetricFamily, name, text, OF, stored, what)


def _family(
    kind: type[Family],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[list[str], object]],
    attribute: str,
) -> Family:
    """A family with a sample for each row: its labels, and what has the number."""
    family = kind(name, text, labels=labels)
    for values, counts in rows:
        family.add_metric(values, getattr(counts, attribute))
    return family


COLLECTOR = CountsCollector()
REGISTRY.register(COLLECTOR)
