"""Counts in vLLM's own metrics, on the way that it has for counts of KV connectors.

A worker adds counts to the output of a step, the scheduler to its messages to the front end, which
shows them at ``/metrics`` and in its log, from whatever process the worker runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.outputs import KVConnectorOutput

from topkv_engines.counts import COUNTERS, GAUGES


class TopkvStats(KVConnectorStats):
    """Counts of some time, by the names of ``COUNTERS`` and ``GAUGES``."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another time or rank."""
        summed = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        self.data = {**self.data, **other.data, **summed}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return figures for a line of the log."""
        found = self.data.get("hits", 0) + self.data.get("misses", 0)
        return {
            "topkv hit rate": round(self.data.get("hits", 0) / max(1, found), 4),
            "loaded MiB": round(self.data.get("loaded_bytes", 0) / 2**20, 1),
            "pages held": self.data.get("used_pages", 0),
        }

    def is_empty(self) -> bool:
        """Return True if there are no counts."""
        return not self.data


def with_counts(output: Any, counts: Mapping[str, float] | None) -> Any:
    """Return a step's output, and counts with it if there are any."""
    if counts is not None:
        inner = getattr(output, "model_runner_output", None)  # tokens are on their way
        if inner is None:
            output = inner = copy(output)  # vLLM has one for all steps that put out nothing
        stats = TopkvStats(dict(counts))
        inner.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
    return output


class TopkvPromMetrics(KVConnectorPromMetrics):
    """The front end's side: metrics ``vllm:topkv_...`` of Prometheus.

    Args:
        vllm_config, metric_types, labelnames, per_engine_labelvalues: as vLLM hands them over.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(kind: Any, reported: Mapping[str, str], **more: Any) -> dict[str, Any]:
            return {
                name: create_metric_per_engine(
                    kind(f"vllm:topkv_{name}", text, labelnames=labelnames, **more),
                    per_engine_labelvalues,
                )
                for name, text in reported.items()
            }

        self._counters = made(self._counter_cls, COUNTERS)
        self._gauges = made(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show what arrived."""
        for name, metric in self._counters.items():
            metric[engine_idx].inc(transfer_stats_data.get(name, 0))
        for name, metric in self._gauges.items():
            if name in transfer_stats_data:
                metric[engine_idx].set(transfer_stats_data[name])
