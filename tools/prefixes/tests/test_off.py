"""Why nothing is found, and what observers see of what is."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve

from tests.machines.dropping import OPTIONS
from tests.machines.kept import make_kept
from tests.machines.quotas import take
from topkv import SparseCoordinator
from topkv.config.stages import Named
from topkv.entries import NoParameters, PluginEntry
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.models.stage_doubles import Keep
from topkv_testing.tiers import tier

CPU = tier("cpu")


def test_a_stage_that_gives_pages_back_ends_the_sharing_of_prefixes():
    """Pages that moved up are found by no chain of keys."""
    coordinator = make_kept(CPU, **OPTIONS)
    assert coordinator.keeper.off
    coordinator.close()


class Counting(Keep):
    """Keeps a number of each request."""

    @hookimpl
    def spec(self):
        return StageSpec((RepresentationSpec("seen", "request", (1,), torch.int64),))


def test_a_stage_that_keeps_something_of_a_request_ends_the_sharing_of_prefixes(make):
    entry = PluginEntry("counting", "stage", f"{__name__}:Counting")
    assert not make(stages=["rerank_exact"]).keeper.off
    assert make(registry=doubles(entry), stages=["counting"]).keeper.off


def test_a_configuration_alone_says_who_keeps_pages():
    """Any coordinator of it keeps them; without the setting nobody does."""
    for pages, found in (("prefixes", 8), ({"name": "prefixes"}, 8), ("core", None)):
        made = make_coordinator(CPU, pages=pages)
        coordinator = SparseCoordinator(made.config, made.registry)
        made.close()
        if found is None:
            assert coordinator.keeper is None
        else:
            assert coordinator.config.pages.params.keep == "prompt"
            assert [take(coordinator, [1] * 12) for _ in range(2)] == [0, found]
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
    plain = make_kept(CPU, registry=registry)
    plain.close()
    config = evolve(plain.config, observers=(Named("keeps", NoParameters()),))
    coordinator = SparseCoordinator(config, registry)
    prefixes = coordinator.keeper
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
    without = SparseCoordinator(evolve(config, pages="core"), registry)
    assert not without.observers.counts
    without.close()
