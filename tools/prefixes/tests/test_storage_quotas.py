"""Quotas of tenants below host memory."""

from __future__ import annotations

import pytest
from attrs import evolve
from storage_driver import PROMPT, run, stored

from tests.machines.kept import make_kept
from topkv.errors import ConfigError
from topkv_prefixes import fetching
from topkv_prefixes.objects import owner_of
from topkv_testing.machines.lifecycle_model import doubles
from topkv_testing.models.storage_doubles import SHELF
from topkv_testing.tiers import tier


@pytest.fixture
def make(make_stored):
    return make_stored


def test_tenants_stay_within_their_quotas(make, shelf):
    """In the storage; of one that is not named as much as ``"*"`` says."""
    plain = make()
    run(plain)
    stored(plain)
    size = max(map(len, shelf.objects.values()))
    shelf.objects.clear()
    coordinator = make(quotas={"a": 3 * size, "*": 5 * size})
    for tenant in ("b", "a", "c", "", "a"):
        with coordinator.keeper.tenant(tenant):
            for first in (100, 200):
                run(coordinator, list(range(first, first + 30)))
                stored(coordinator)
    counts = {
        tenant: sum(key.startswith(owner_of(tenant)) for key in shelf.objects)
        for tenant in ("a", "b", "c", "", "*")
    }
    assert counts == {"a": 3, "b": 5, "c": 5, "": 5, "*": 0}
    assert sum(counts.values()) == len(shelf.objects)


def test_a_quota_without_room_for_a_page_is_refused(make):
    with pytest.raises(ConfigError, match="'a' must be at least a stored page"):
        make(quotas={"a": 4096, "*": "1GiB"})


def test_the_first_pages_of_a_prompt_are_stored_last(make, shelf, monkeypatch):
    """Batch by batch, so that what was stored longest ago is its end."""
    coordinator = make(quotas={"*": "1GiB"})
    monkeypatch.setattr(fetching, "MOST_PAGES", 2)
    run(coordinator)
    stored(coordinator)
    kept = [*shelf.objects]
    names = coordinator.keeper._keys(PROMPT, b"")
    keys = coordinator.keeper.storage._keys(names)[: len(kept)]
    assert kept == [key for at in range(len(keys) - 1 - (len(keys) - 1) % 2, -1, -2)
                    for key in keys[at : at + 2]]  # fmt: skip


def test_quotas_want_a_storage_that_keeps_them(make):
    plain = evolve(SHELF, name="plain", quotas=False)
    storage = {"name": "plain", "quotas": {"a": "1GiB"}}
    with pytest.raises(ConfigError, match="quotas must be left out"):
        make_kept(tier("cpu"), {"storage": storage}, registry=doubles(plain))
