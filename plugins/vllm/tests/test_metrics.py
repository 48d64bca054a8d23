"""Counts of topkv among vLLM's own metrics."""

from __future__ import annotations

import pytest

from topkv_engines.counts import Look

PREFIX = "vllm:topkv_"


def shown():
    """Values by name, as Prometheus would see them."""
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return {
        sample.name.removeprefix(PREFIX): sample.value
        for sample in samples
        if sample.name.startswith(PREFIX) and not sample.name.endswith("_created")
    }


SPARSE = {"budget": 128, "buffer": 128, "unit": 16, "max_requests": 2, "observers": ["stalls"]}


def test_metrics_are_what_the_coordinator_counts(served, prompt, monkeypatch):
    monkeypatch.setattr("topkv_engines.counts.EVERY", 0.0)
    engine = served(SPARSE, disable_log_stats=False)
    waited = engine.session.coordinator.observers.counts["stalls"]
    begun, idle = engine.session.coordinator.transfers_of(), waited()  # what warmed up is in none
    engine.answer([prompt(400), prompt(200)], 12)
    metrics, report = shown(), engine.session.coordinator.transfers_of()
    assert metrics["hits_total"] == report.hits - begun.hits > 0
    assert metrics["misses_total"] == report.misses - begun.misses > 0
    assert metrics["loaded_bytes_total"] == report.loaded_bytes - begun.loaded_bytes > 0
    stalled = sum(waited().values()) - sum(idle.values())
    assert metrics["stall_seconds_total"] == pytest.approx(stalled / 1e3)
    config = engine.session.coordinator.config
    assert metrics["pages"] == config.num_pages - 1
    engine.add("runs", prompt(100), 40)
    engine.steps(6)
    assert shown()["used_pages"] == engine.session.coordinator.manager.host.used > 0
    engine.run()
    hits = engine.session.coordinator.transfers_of().hits
    assert shown()["hits_total"] == hits - begun.hits > report.hits - begun.hits


def test_the_device_is_not_asked_in_every_step(served, prompt, monkeypatch):
    """The device is asked once a second, and when no request is left."""
    monkeypatch.setattr("topkv_engines.counts.EVERY", 1e9)
    engine, asked = served(), []
    monkeypatch.setattr(
        "topkv_engines.counts.Look", lambda coordinator: (asked.append(1), Look(coordinator))[1]
    )
    engine.answer([prompt(100)], 20)
    assert len(asked) <= 2


def test_counts_of_several_times_are_one_line(served):
    """The line is of a front end's log; pages are those of the last time."""
    from topkv_vllm.connector import TopkvConnector

    one = TopkvConnector.build_kv_connector_stats({"hits": 3, "misses": 1, "used_pages": 7})
    two = TopkvConnector.build_kv_connector_stats(
        {"hits": 5, "misses": 1, "loaded_bytes": 2**20, "used_pages": 2}
    )
    assert TopkvConnector.build_kv_connector_stats().is_empty()
    summed = TopkvConnector.build_kv_connector_stats().aggregate(one).aggregate(two)
    assert summed.reduce() == {"topkv hit rate": 0.8, "loaded MiB": 1.0, "pages held": 2}
    summed.reset()
    assert summed.is_empty()
