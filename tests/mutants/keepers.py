"""Mutants of who keeps pages, and of kinds of plugins that packages bring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import evolve

from tests.machines.kept import make_kept
from tests.machines.quotas import take
from tests.mutants.lifecycle import LifecycleMutant
from topkv import SparseCoordinator
from topkv.entries import KINDS
from topkv.errors import ConfigError
from topkv.kv.host_pool import HostKVPool
from topkv.plugins import kinds
from topkv.plugins.discovery import hookimpl
from topkv_prefixes import prefixes, settings, tier
from topkv_prefixes.places import fingerprint_of
from topkv_testing.machines.lifecycle_model import doubles
from topkv_testing.models.storage_doubles import SHELF


def run_configured(on):
    """Any coordinator of a configuration keeps the pages that it says."""
    made = make_kept(on)
    coordinator = SparseCoordinator(made.config, made.registry)
    made.close()
    assert [take(coordinator, [1] * 12) for _ in range(2)] == [0, 8]
    coordinator.close()


def run_policies(on):
    """Pages that are kept by one policy are not those of another in a storage."""
    found = set()
    for keep in settings.KEEPS:
        made = make_kept(on, {"keep": keep, "storage": {"name": "shelf"}})
        found.add(made.keeper.storage._shared.fingerprint)
        made.close()
    assert len(found) == 2


def run_without_quotas(on):
    """Quotas below host memory want a storage that keeps them."""
    asked = {"name": "plain", "quotas": {"a": "1GiB"}}
    registry = doubles(evolve(SHELF, name="plain", quotas=False))
    with pytest.raises(ConfigError, match="quotas must be left out"):
        make_kept(on, {"storage": asked}, registry=registry)


def run_kinds(on):
    """A package brings a kind, and cannot take one of the core."""
    point = SimpleNamespace(name="algorithm", value="elsewhere", dist=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "entry_points", lambda group: [point])
        made = getattr(kinds.kinds, "__wrapped__", kinds.kinds)()
    assert made["algorithm"] == "topkv.hooks.algorithm"


def a_package_wins():
    brought = {point.name: point.value for point in kinds.entry_points(group=kinds.GROUP)}
    return {**{kind: f"topkv.hooks.{kind}" for kind in KINDS}, **brought}


def whatever_is_kept(config, manager, keep):
    return fingerprint_of(config, manager, "all")


MUTANTS = [
    LifecycleMutant(
        "a keeper gets a pool that keeps nothing",
        *(prefixes.PrefixKeeper, "host_pool", hookimpl(lambda self: HostKVPool), run_configured),
    ),
    LifecycleMutant(
        "a storage finds what was kept by another policy",
        *(tier, "fingerprint_of", whatever_is_kept, run_policies),
    ),
    LifecycleMutant(
        "quotas are left to a storage that keeps none",
        *(settings, "keeps_quotas", lambda entry: True, run_without_quotas),
    ),
    LifecycleMutant(
        "a package takes a kind of the core",
        *(kinds, "kinds", a_package_wins, run_kinds),
    ),
]
