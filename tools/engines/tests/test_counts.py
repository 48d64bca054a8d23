"""Counts of a worker beside those of its coordinator. ``test_mutants.py`` breaks each rule."""

from __future__ import annotations

import pytest
import torch

from tools.engines.tests.steps import CHUNK, Engine
from topkv_engines import counts
from topkv_engines.counts import Look

STEPS = [CHUNK, *[1] * 6]
"""Tokens of each of two requests."""


def reports_of(engine, names=("0", "1")):
    """Reports after each step, and without requests."""
    for tokens in STEPS:
        engine.run(dict.fromkeys(names, tokens))
        yield engine.session.counts.take()
    for name in names:
        engine.session.requests.end(name)
    yield engine.session.counts.take()


def check_sums(engine, reports):
    """Reports add up to what the coordinator has counted; returns its misses."""
    counted = engine.session.coordinator.transfers_of()
    for name in ("hits", "misses", "loaded_bytes"):
        total = sum(report[name] for report in reports if report)
        assert total == getattr(counted, name), name
    return counted.misses


def test_reports_add_up_to_what_the_coordinator_counts(monkeypatch):
    monkeypatch.setattr(counts, "EVERY", 0.0)
    engine, reports = Engine(), []
    for report in reports_of(engine):
        assert report, "a CPU has done all that it was given"
        reports.append(report)
        misses = check_sums(engine, reports)
    assert misses
    assert [report["used_pages"] for report in reports[-2:]] == [8, 0]


def test_what_has_not_come_is_reported_later(monkeypatch):
    """It is asked for again; without requests, everything is looked at anew."""
    monkeypatch.setattr(counts, "EVERY", 0.0)
    come = [True, False, False, True, False, False, False]
    asked = iter(come)
    monkeypatch.setattr(Look, "ready", property(lambda look: next(asked)))
    engine = Engine()
    reports = [*reports_of(engine)]
    assert [report is not None for report in reports] == [*come, True]
    assert check_sums(engine, reports)


def test_counts_before_a_reset_are_forgotten(monkeypatch):
    """As those of a warm-up are: neither reports nor totals have them."""
    monkeypatch.setattr(counts, "EVERY", 0.0)
    engine = Engine()
    for tokens in STEPS:
        engine.run({"0": tokens})
    engine.session.requests.end("0")
    kept = engine.session.counts
    assert min(kept.total().values()) > 0
    kept.reset()
    assert set(kept.total().values()) == {0}
    reports = [*reports_of(engine, ("1", "2"))]
    for name, value in kept.total().items():
        assert value == sum(report[name] for report in reports) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_nothing_while_requests_are_there(monkeypatch):
    """A device that is busy for half a second is asked, and asked again when it has done it."""
    monkeypatch.setattr(counts, "EVERY", 0.0)
    engine = Engine(device="cuda")
    for tokens in STEPS:
        engine.run({"0": tokens, "1": tokens})
    reports = [engine.session.counts.take()]
    while reports[-1] is None:
        torch.cuda.synchronize()
        reports.append(engine.session.counts.take())
    torch.cuda._sleep(10**9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        late = [engine.session.counts.take() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert late == [None] * 3
    torch.cuda.synchronize()
    reports.append(engine.session.counts.take())
    assert check_sums(engine, reports)
