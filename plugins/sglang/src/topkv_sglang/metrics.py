"""Counts of topkv in what SGLang reports: its internal state, and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topkv.report import count_occupancy
from topkv_engines.counts import COUNTERS, GAUGES
from topkv_engines.session import Session
from topkv_sglang.requests import ScheduledRequests


def state(session: Session) -> dict[str, float]:
    """Return counts of a session from its begin. Waits for the device."""
    requests, coordinator = session.requests, session.coordinator
    assert isinstance(requests, ScheduledRequests), "allocated"
    assert session.counts is not None, "allocated"
    pages = count_occupancy(coordinator.requests)
    return {
        **session.counts.total(),
        "pages": pages.pages,
        "used_pages": pages.used_pages,
        "requests": len(requests.held),
        "found_tokens": requests.found,
        "replaced_pages": requests.replaced,
    }


class Metrics:
    """Metrics ``sglang:topkv_...`` of Prometheus, with the labels of SGLang's own.

    Made in a scheduler, whose process knows by then where SGLang's server collects metrics.

    Args:
        labels: values by name.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        names, labels = [*labels], dict(labels)
        self._counters = {
            name: Counter(f"sglang:topkv_{name}", text, labelnames=names).labels(**labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(
                f"sglang:topkv_{name}", text, labelnames=names, multiprocess_mode="mostrecent"
            ).labels(**labels)
            for name, text in GAUGES.items()
        }

    def show(self, counts: Mapping[str, float] | None) -> None:
        """Show counts since the last time; None changes nothing."""
        for name, counter in self._counters.items():
            counter.inc((counts or {}).get(name, 0))
        for name, gauge in self._gauges.items():
            if counts is not None:
                gauge.set(counts[name])
