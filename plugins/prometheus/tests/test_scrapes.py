"""Questions to the device: when, by whom; and the series of an observer that is gone."""

from __future__ import annotations

import gc
import threading

import pytest
from attrs import evolve
from prometheus_client import REGISTRY, generate_latest

from topkv.config.stages import Named
from topkv.entries import NoParameters
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv.report import Occupancy, TransferReport
from topkv_prometheus.entry import PrometheusParams
from topkv_prometheus.observer import PrometheusObserver
from topkv_testing.machines.lifecycle_model import SPARSE, make_coordinator
from topkv_testing.tiers import tier

EVERY = 100
"""Forwards from one look to the next, by default."""


@pytest.fixture
def observer():
    coordinator = make_coordinator(tier("cpu"))
    yield PrometheusObserver(ObserverSetup(coordinator.config, PrometheusParams()))
    coordinator.close()


def misses(observer, layer):
    """Misses of a layer, by a scrape in a thread of its own."""
    said = []

    def scrape():
        labels = {"coordinator": str(observer.counts.coordinator), "layer": str(layer)}
        said.append(REGISTRY.get_sample_value("topkv_misses_total", labels))

    thread = threading.Thread(target=scrape)
    thread.start()
    thread.join()
    return said[0]


def test_the_device_is_asked_in_every_hundredth_forward_and_by_no_scrape(observer):
    asked, layer = [], SPARSE[0]

    def totals():
        asked.append((observer.counts.forwards, threading.current_thread()))
        return TransferReport(0, 7, 0, layers={layer: TransferReport(0, 7, 0)})

    report = ForwardReport((), 0, totals, totals, lambda: Occupancy(4, 2, 3, 1))
    for forward in range(1, 2 * EVERY + 1):
        observer.before_forward(report)
        assert misses(observer, layer) == (0 if forward <= EVERY else 7)
        observer.after_forward(report)
    assert asked == [(at, threading.current_thread()) for at in (EVERY, 2 * EVERY)]


def test_series_begin_at_0_and_vanish_with_their_observer():
    coordinator = make_coordinator(tier("cpu"))
    gone = PrometheusObserver(ObserverSetup(coordinator.config, PrometheusParams()))
    label = f'coordinator="{gone.counts.coordinator}"'
    lines = [line for line in generate_latest().decode().splitlines() if label in line]
    assert len(lines) == 3 + 3 * len(SPARSE)  # nothing says yet how much is held
    assert all(line.endswith(" 0.0") for line in lines)
    del gone
    gc.collect()
    assert label not in generate_latest().decode()
    coordinator.close()


@pytest.mark.parametrize("shown", [True, False])
def test_stalls_are_shown_where_they_are_measured(shown):
    """Another observer counts them, and is asked when the device is asked for the rest."""
    coordinator = make_coordinator(tier("cpu"))
    named = (Named("stalls", NoParameters()),) if shown else ()
    asked, totals = [], coordinator.transfers_of()
    config = evolve(coordinator.config, observers=named)
    observer = PrometheusObserver(ObserverSetup(config, PrometheusParams(every=EVERY)))
    own = {"coordinator": str(observer.counts.coordinator), "layer": str(SPARSE[0])}

    def seconds():
        return REGISTRY.get_sample_value("topkv_stall_seconds_total", own)

    def waited():
        asked.append(observer.counts.forwards)
        return {SPARSE[0]: 250.0}

    counts = {"stalls": waited} if shown else {}
    held = Occupancy(4, 2, 3, 1)
    report = ForwardReport((), 0, lambda: totals, lambda: totals, lambda: held, counts)
    for _ in range(EVERY):
        assert seconds() == (0 if shown else None)
        observer.before_forward(report)
        observer.after_forward(report)
    assert asked == ([EVERY] if shown else [])
    assert seconds() == (0.25 if shown else None)
    coordinator.close()
