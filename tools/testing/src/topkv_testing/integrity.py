"""Checks that pages, counts and maps of a coordinator agree with each other. Slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from topkv.coordinator import SparseCoordinator
from topkv.kv.engine_pages import EngineKVPool
from topkv.kv.host_pool import PageAllocator
from topkv.kv.store import UNSELECTED, GroupStore
from topkv_prefixes.pages import PrefixPages


def check_integrity(coordinator: SparseCoordinator) -> None:
    """Check that counts add up on both tiers, and that every map is consistent. Synchronizes.

    Raises:
        AssertionError: with everything that is wrong on a tier.
    """
    slots = range(coordinator.config.max_requests)
    pages, manager = coordinator.requests.pages, coordinator.manager
    manager.synchronize()
    check_pages(manager.host, [pages.of(slot) for slot in slots])
    for store in manager.stores:
        if store.group.residency == "sparse":
            check_maps(store)


def check_pages(pool: PageAllocator, holders: Sequence[Sequence[int]]) -> None:
    """Compare the reference counts of a host pool with the pages that requests hold.

    Args:
        holders: the page list of each request.

    Raises:
        AssertionError: a count is wrong, or a page is lost or free twice.
    """
    if isinstance(pool, PrefixPages):
        holders = [*holders, pool.lent]
    counts = np.zeros(pool.num_pages, dtype=np.int32)
    for pages in holders:
        np.add.at(counts, np.asarray(pages, dtype=np.int64), 1)
    problems = [
        f"page {page} has {pool.references[page]} references, its holders are {counts[page]}"
        for page in np.flatnonzero(counts != pool.references)
    ]
    if counts[0]:
        problems.append("page 0 was leased")
    if not isinstance(pool, EngineKVPool):  # there an engine knows which pages are free
        problems += _free_problems(pool)
    if isinstance(pool, PrefixPages):
        problems += _kept_problems(pool)
    assert not problems, "host pool integrity: " + "; ".join(problems)


def _free_problems(pool: PageAllocator) -> list[str]:
    problems, free = [], pool._free
    if len(set(free)) != len(free):
        problems.append("a page is in the free list twice")
    if pool.references[np.asarray(free, dtype=np.int64)].any():
        problems.append("a page in the free list is still referenced")
    if 0 in free:
        problems.append("page 0 is in the free list")
    if pool.free + int((pool.references > 0).sum()) != pool.num_pages - 1:
        problems.append("free and used pages do not add up")
    return problems


def _kept_problems(pool: PrefixPages) -> list[str]:
    """Problems of pages that are kept for later requests."""
    problems, kept, key_of = [], pool._kept, pool._key_of
    if pool.references[list(kept)].any() or not kept.keys() <= key_of.keys():
        problems.append("a page that is kept is held, or cannot be found")
    if {page: key for key, page in pool._page_of.items()} != key_of:
        problems.append("pages and their keys do not belong together")
    parts = [page for own in pool._kept_for.values() for page in own]
    if sorted(parts) != sorted(kept) or any(
        pool.tenant_of(key_of[page]) != tenant
        for tenant, own in pool._kept_for.items()
        for page in own.keys() & key_of.keys()
    ):
        problems.append("what is kept for tenants is not what is kept")
    if set(pool._free) & key_of.keys():
        problems.append("a page in the free list can be found")
    return problems


def check_maps(store: GroupStore) -> None:
    """Check that order is a permutation, the two maps are inverse, and no stamp is left.

    Raises:
        AssertionError: with the first thing that is wrong.
    """
    slots = torch.arange(store.group.buffer_slots, device=store.order.device)
    expected = slots.expand(store.order.shape)
    ordered = torch.equal(store.order.long().sort(-1).values, expected)
    assert ordered, "the eviction order of a lane is not a permutation of its slots"
    assert (store.stamp == UNSELECTED).all(), "a stamp outlived its plan"
    held = store.slot_unit >= 0
    back = store.unit_slot.gather(-1, store.slot_unit.clamp(min=0).long())
    same = torch.equal(back[held].long(), expected[held])
    assert same, "a slot's unit does not point back at it"
    claimed = "a unit claims a slot that does not hold it"
    assert torch.equal(held.sum(-1), (store.unit_slot >= 0).sum(-1)), claimed
    assert store.unit_slot.min() >= -1, claimed
