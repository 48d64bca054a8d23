"""Why nothing is found, and what observers see of what is."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve

from topkv import SparseCoordinator
from topkv.config.stages import ObserverSettings
from topkv.entries import NoParameters, PluginEntry
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.discovery import hookimpl
from topkv.hooks.stage import StageSpec
from topkv_prefixes.prefixes import PrefixCoordinator, Prefixes
from topkv_testing.machines.dropping import OPTIONS
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.machines.quotas import take
from topkv_testing.models.stage_doubles import Keep
from topkv_testing.tiers import tier

CPU = tier("cpu")


def test_a_stage_that_gives_pages_back_ends_the_sharing_of_prefixes():
    """Pages that moved up are found by no chain of keys."""
    coordinator = make_coordinator(CPU, prefix_cache="all", **OPTIONS)
    assert coordinator.prefixes.off
    coordinator.close()


class Counting(Keep):
    """Keeps a number of each request."""

    @hookimpl
    def spec(self):
        return StageSpec((RepresentationSpec("seen", "request", (1,), torch.int64),))


def test_a_stage_that_keeps_something_of_a_request_ends_the_sharing_of_prefixes(make):
    entry = PluginEntry("counting", "stage", f"{__name__}:Counting")
    kept = {"prefix_cache": "all"}
    assert not make(stages=["rerank_exact"], **kept).prefixes.off
    assert make(registry=doubles(entry), stages=["counting"], **kept).prefixes.off


def test_a_pool_that_keeps_nothing_says_so():
    coordinator = make_coordinator(CPU)
    assert Prefixes(coordinator).off == ["the coordinator was made without host_pool=PrefixKVPool"]
    coordinator.close()


class Keeps:
    """An observer that keeps its reports."""

    reports: ClassVar = []

    def __init__(self, setup):
        self.reports.clear()

    @hookimpl
    def before_forward(self, report):
        self.reports.append(report)

    @hookimpl
    def after_forward(self, report):
        """Nothing is left to see."""


def test_observers_see_what_is_found_when_they_ask():
    registry = doubles(PluginEntry("keeps", "observer", f"{__name__}:Keeps"))
    plain = make_coordinator(CPU, registry=registry, prefix_cache="all")
    plain.close()
    config = evolve(plain.config, observers=(ObserverSettings("keeps", NoParameters()),))
    coordinator = PrefixCoordinator(config, registry)
    prefixes = coordinator.prefixes
    for found, tokens in ((0, [1] * 8), (4, [1] * 8), (0, [2] * 8)):
        with prefixes.tenant("a"):
            before = prefixes.counts.found
            take(coordinator, tokens)
        counts = Keeps.reports[0].counts["prefixes"]()
        assert counts == prefixes.counts
        assert counts.found - before == found
    tenant = counts.tenants["a"]
    assert (tenant.asked, tenant.found, tenant.kept) == (24, 4, 4)
    coordinator.close()
    without = SparseCoordinator(config, registry)
    assert not without.observers.counts
    without.close()
