"""Metrics of prompts that were found, by tenant, and of pages that went to a storage."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from tests.machines.kept import make_kept
from tests.machines.quotas import take
from topkv.hooks.observer import ObserverSetup
from topkv_prometheus.entry import PrometheusParams
from topkv_prometheus.observer import PrometheusObserver
from topkv_testing.models.storage_doubles import SHELVES, Shelf
from topkv_testing.tiers import tier


@pytest.fixture
def shelf():
    SHELVES["scraped"] = Shelf()
    yield {"name": "shelf", "params": {"shelf": "scraped"}}
    del SHELVES["scraped"]


@pytest.fixture
def watched(shelf):
    """A coordinator over a storage, and what was scraped of it: by name, and tenant if any."""
    coordinator = make_kept(tier("cpu"), {"storage": shelf})
    observer = PrometheusObserver(ObserverSetup(coordinator.config, PrometheusParams()))
    coordinator.observers.named = {"topkv-prometheus": observer}

    def scraped():
        return {
            (sample.name, sample.labels.get("tenant")): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith(("topkv_prefix_", "topkv_storage_"))
            and sample.labels["coordinator"] == str(observer.counts.coordinator)
        }

    yield coordinator, scraped
    coordinator.close()


def test_nothing_is_shown_before_the_first_forward(watched):
    _, scraped = watched
    assert scraped() == {}


def test_prefixes_are_shown_by_tenant_and_stores_by_coordinator(watched):
    coordinator, scraped = watched
    take(coordinator, [3] * 9)
    for found in (0, 8):
        with coordinator.keeper.tenant("acme"):
            assert take(coordinator, [3] * 9) == found
    coordinator.keeper.storage.wait()
    counts, seen = coordinator.keeper.counts, scraped()
    page = coordinator.manager.host.bytes.numel() // coordinator.manager.host.num_pages
    for tenant, numbers in {"": (9, 0, 0, 2, 2 * page), "acme": (18, 8, 0, 2, 2 * page)}.items():
        names = ("asked_tokens_total", "found_tokens_total", "evicted_pages_total", "kept_pages",
                 "kept_bytes")  # fmt: skip
        assert tuple(seen.pop((f"topkv_prefix_{name}", tenant)) for name in names) == numbers
    stored = counts.storage
    assert stored.stored == 4
    assert seen == {
        ("topkv_storage_found_tokens_total", None): stored.found,
        ("topkv_storage_fetched_pages_total", None): stored.fetched,
        ("topkv_storage_fetched_bytes_total", None): stored.fetched_bytes,
        ("topkv_storage_stored_pages_total", None): 4,
        ("topkv_storage_stored_bytes_total", None): stored.stored_bytes,
        ("topkv_storage_damaged_pages_total", None): 0,
        ("topkv_storage_late_prompts_total", None): 0,
        ("topkv_storage_failed_calls_total", None): 0,
        ("topkv_storage_dropped_pages_total", None): 0,
    }
