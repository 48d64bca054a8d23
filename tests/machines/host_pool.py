"""A state machine of the host pool: leases, shares and releases against a dict of counts.

Run it for an allocator of your own, which must have the calls of ``PageAllocator``::

    class Mine(HostPoolMachine):
        def make(self, num_pages):
            return MyAllocator(num_pages)

    run_state_machine_as_test(Mine)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from topkv.errors import HostMemoryError, RequestError
from topkv.kv.host_pool import HostKVPool, PageAllocator, entry_view
from topkv.types import GroupShape
from topkv_testing.integrity import check_pages
from topkv_testing.transfer.bench import group_shape


def _group(layers: tuple[int, ...], unit: int, lane_heads: int) -> GroupShape:
    heads: dict[str, Any] = {"lane_heads": lane_heads, "heads_per_lane": 2 // lane_heads}
    sizes = {"unit": unit, "units": 8 // unit, "page_units": 4 // unit, "select": 1, "slots": 2}
    return evolve(group_shape(requests=2, **heads | sizes), layers=layers)


class HostPoolMachine(RuleBasedStateMachine):
    """Any sequence of leases, shares and releases keeps ``free + used == total``.

    ``holders`` are lists of pages, as the requests of a coordinator hold them.
    """

    def make(self, num_pages: int) -> Any:
        """The allocator under test."""
        return PageAllocator(num_pages)

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = self.make(num_pages)
        self.total = num_pages - 1
        self.holders: list[list[int]] = []
        self.ever: set[int] = set()

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    @rule(count=st.integers(0, 13))
    def lease(self, count: int) -> None:
        free = self.total - len(self.counts)
        if count > free:
            with pytest.raises(HostMemoryError, match=f"{free} of {self.total} are free"):
                self.pool.lease(count)
            return
        pages = self.pool.lease(count)
        assert len(set(pages)) == len(pages) == count
        assert not set(pages) & set(self.counts), "a page was leased twice"
        assert all(0 < page <= self.total for page in pages)
        self.holders.append(list(pages))
        self.leased(pages)

    def leased(self, pages: list[int]) -> None:
        """Count a new holder of these pages."""
        self.ever.update(pages)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.counts)), unique=True))
        self.pool.share(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give back some pages of a holder; pages that nobody else holds become free."""
        holder = data.draw(st.sampled_from(self.holders))
        pages = data.draw(st.lists(st.sampled_from(holder), unique=True)) if holder else []
        for page in pages:
            holder.remove(page)
        freed = self.pool.release(pages)
        assert sorted(freed) == sorted(page for page in pages if page not in self.counts)

    @rule(data=st.data(), call=st.sampled_from(["share", "release"]))
    def refuse(self, data: st.DataObject, call: str) -> None:
        """Calls on page 0, missing pages or free ones are refused: a double free, say."""
        held = self.counts
        wrong = [page for page in range(-1, self.total + 3) if page not in held]
        page = data.draw(st.sampled_from(wrong))
        with pytest.raises(RequestError, match=f"page {page} is not leased"):
            getattr(self.pool, call)([page])

    @rule(data=st.data())
    def find_corruption(self, data: st.DataObject) -> None:
        """``check_pages`` finds every kind of corruption."""
        references, free = self.pool.references, self.pool._free
        held = sorted(self.counts)
        kept = references.copy(), list(free)
        holders = [list(pages) for pages in self.holders]
        page = data.draw(st.integers(1, self.total)) if self.total else 0
        kinds = ["count", "page 0", *(["lost", "twice"] if free else []), *(["free"] * bool(held))]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "count":
            references[page] += 1
        elif kind == "page 0":
            free.append(0)
        elif kind == "lost":
            free.pop()
        elif kind == "twice":
            free.append(free[0])
        else:
            free.append(held[0])
        with pytest.raises(AssertionError, match="host pool integrity"):
            check_pages(self.pool, self.holders)
        references[:], free[:] = kept
        if held:
            holders[next(i for i, pages in enumerate(holders) if pages)].pop()
            with pytest.raises(AssertionError, match="its holders are"):
                check_pages(self.pool, holders)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = self.counts
        assert self.pool.used == len(counts)
        assert self.pool.free == self.total - len(counts)
        for page in range(self.total + 1):
            assert self.pool.references[page] == counts[page]
            assert self.pool.shared(page) == (counts[page] > 1)
        check_pages(self.pool, self.holders)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for pages in self.holders:
                self.pool.release(pages)
            assert (self.pool.free, self.pool.used) == (self.total, 0)
            check_pages(self.pool, [])


class HostKVPoolMachine(HostPoolMachine):
    """The machine over real memory: a write to one page never shows in another."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        groups = [_group((0, 3), 2, 2), _group((1,), 1, 1), _group((2,), 4, 1)]
        self.groups = groups
        super().start(num_pages)
        self.marks: dict[int, float] = {}

    def make(self, num_pages: int) -> Any:
        return HostKVPool(self.groups, num_pages, torch.device("cpu"))

    def leased(self, pages: list[int]) -> None:
        super().leased(pages)
        for page in pages:
            self.marks[page] = len(self.marks) + 1000.0 * len(self.holders) + page
            for index, entries in enumerate(self._entries()):
                entries[page] = self.marks[page] + 0.125 * index

    def _entries(self) -> list[Tensor]:
        pool, places = self.pool, zip(self.groups, self.pool.layouts, strict=True)
        return [entry_view(pool.bytes, group, at, pool.num_pages) for group, at in places]

    @invariant()
    def pages_lie_apart(self) -> None:
        if not hasattr(self, "pool"):
            return
        for index, (group, entries) in enumerate(zip(self.groups, self._entries(), strict=True)):
            shape = (self.total + 1, len(group.layers), group.lane_heads, group.units_per_page)
            assert entries.shape == (*shape, *group.entry_shape)
            assert all(of_layer.is_contiguous() for of_layer in entries.unbind(1))
            for page, mark in self.marks.items():
                assert (entries[page] == mark + 0.125 * index).all(), f"page {page} changed"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "pool"):
            self.pool.close()
            self.pool.close()
