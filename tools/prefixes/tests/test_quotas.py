"""Tenants: they find their own pages alone, and what is kept for each stays within its quota."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.machines.kept import make_kept
from tests.machines.quotas import run_quota_scene, take
from topkv.errors import ConfigError, RequestError
from topkv_prefixes.pages import PrefixPages, tenant_in
from topkv_prefixes.prefixes import IDLE_TENANTS
from topkv_testing.integrity import check_pages
from topkv_testing.tiers import tier

TENANTS = b"", b"a", b"b"


class QuotaMachine(RuleBasedStateMachine):
    """Requests of tenants, against a list of what is kept for each, oldest first."""

    @initialize(
        num_pages=st.integers(2, 12),
        limits=st.tuples(*[st.sampled_from([None, 0, 1, 2, 5])] * len(TENANTS)),
    )
    def start(self, num_pages, limits):
        self.pool, self.total = PrefixPages(num_pages), num_pages - 1
        self.limits = dict(zip(TENANTS, limits, strict=True))
        self.pool.limit_of = self.limits.__getitem__
        self.pool.on_evict = self.gone
        self.held, self.kept, self.evicted, self.reported = (
            [],
            {each: [] for each in TENANTS},
            0,
            [],
        )
        self.order, self.known = [], {}

    def gone(self, pages, keys):
        assert [self.known.pop(key) for key in keys] == pages
        self.reported += [(tenant_in(key), page) for key, page in zip(keys, pages, strict=True)]

    @property
    def free(self):
        return self.total - len({page for pages in self.held for page in pages})

    @rule(count=st.integers(1, 5), tenant=st.sampled_from(TENANTS), first=st.integers(0, 2))
    def lease(self, count, tenant, first):
        """A request whose pages are published at once; room comes from who went unused longest."""
        if count > self.free:
            return
        short = max(0, count - (self.free - len(self.order)))
        gone, self.order = self.order[:short], self.order[short:]
        self.reported.clear()
        pages = self.pool.lease(count)
        assert [page for _, page in self.reported] == gone
        self.evicted += short
        self.held.append(pages)
        keys = [bytes([first, place] * 16) + tenant for place in range(count)]
        self.pool.publish(pages, keys)
        for key, page in zip(keys, pages, strict=True):
            self.known.setdefault(key, page)

    @rule(first=st.integers(0, 2), tenant=st.sampled_from(TENANTS))
    def hold_again(self, first, tenant):
        keys = [bytes([first, place] * 16) + tenant for place in range(5)]
        pages = self.pool.find(keys)
        assert pages == self.found(keys)
        self.pool.share(pages)
        self.order = [page for page in self.order if page not in pages]
        if pages:
            self.held.append(pages)

    def found(self, keys):
        known = [key in self.known for key in [*keys, None]]
        return [self.known[key] for key in keys[: known.index(False)]]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        """Pages of the request's own tenants go, the longest unused first, and nobody else's."""
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        owner = {page: tenant_in(key) for key, page in self.known.items()}
        others = {page for rest in self.held for page in rest}
        self.order += [p for p in reversed(pages) if p not in others and p in owner]
        self.reported.clear()
        freed = self.pool.release(pages)
        assert sorted(freed) == sorted(p for p in pages if p not in others and p not in owner)
        expected = []
        for tenant in sorted({owner[page] for page in pages if page in owner}):
            mine = [page for page in self.order if owner[page] == tenant]
            limit = self.limits[tenant]
            over = mine[: max(0, len(mine) - limit)] if limit is not None else []
            expected += [(tenant, page) for page in over]
        assert self.reported == expected
        self.evicted += len(expected)
        self.order = [page for page in self.order if page not in {page for _, page in expected}]

    @rule()
    def forget(self):
        assert self.pool.forget() == self.order
        self.order, self.known = [], {}

    @invariant()
    def quotas_hold_and_counts_add_up(self):
        if not hasattr(self, "pool"):
            return
        kept = {tenant: self.pool.kept_for(tenant) for tenant in TENANTS}
        assert sum(kept.values()) == self.pool.kept == len(self.order)
        for tenant, limit in self.limits.items():
            assert limit is None or kept[tenant] <= limit
        assert (self.pool.free, self.pool.evicted) == (self.free, self.evicted)
        check_pages(self.pool, self.held)


def test_quotas_of_pages():
    run_state_machine_as_test(
        QuotaMachine, settings=settings(max_examples=120, stateful_step_count=25, deadline=None)
    )


def test_a_tenant_above_its_quota_loses_its_own_pages(on):
    run_quota_scene(on)


def test_counts_are_reported_by_tenant_and_add_up():
    coordinator = make_kept(tier("cpu"))
    prefixes = coordinator.keeper
    page = coordinator.manager.host.bytes.numel() // coordinator.manager.host.num_pages
    with prefixes.tenant("a"):
        take(coordinator, [1] * 12)
        with prefixes.tenant("b"):
            take(coordinator, [1] * 8)
        take(coordinator, [1] * 12)
    take(coordinator, [1] * 8)
    counts = prefixes.counts
    reported = {
        name: (each.asked, each.found, each.kept, each.kept_bytes // page, each.evicted)
        for name, each in counts.tenants.items()
    }
    assert reported == {"a": (24, 8, 3, 3, 0), "b": (8, 0, 2, 2, 0), "": (8, 0, 2, 2, 0)}
    sums = [sum(each) for each in zip(*reported.values(), strict=True)]
    assert [counts.asked, counts.found, counts.kept, counts.evicted] == [*sums[:3], sums[4]]
    coordinator.close()


def test_tenants_stay_apart_where_an_error_ends_one():
    coordinator = make_kept(tier("cpu"))
    with pytest.raises(KeyError), coordinator.keeper.tenant("a"):
        raise KeyError
    take(coordinator, [1] * 12)
    assert coordinator.keeper.length([1] * 12) == 8
    with coordinator.keeper.tenant("a"):
        assert coordinator.keeper.length([1] * 12) == 0
    coordinator.close()


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ("4GiB", ["must be a mapping with names for keys or None, got '4GiB'"]),
        ({}, ["must be a mapping of tenants such as {'acme': '4GiB'"]),
        ({3: "4GiB"}, ["must be a mapping with names for keys or None, got {3: '4GiB'}"]),
        (
            {"a": "much", "b": 0, "c": 5},
            ["must be sizes by tenant: 'a' must be a positive", "; 'b' must be a positive"],
        ),
    ],
    ids=str,
)
def test_quotas_that_are_wrong_are_refused_together(quotas, expected):
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), {"quotas": quotas})
    (reported,) = refused.value.reasons
    whose = "parameter quotas of topkv-doubles 1 (keeper 'prefixes')"
    assert reported.startswith(f"{whose} {expected[0]}")
    assert all(each in reported for each in expected)
    assert "'c'" not in reported


def test_quotas_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="where all layers lie on the device"):
        make_kept(tier("cpu"), {"quotas": {"a": 9}}, layers={"0-3": "resident"})


@pytest.mark.parametrize("name", [None, 3, b"acme", "\ud800", "a\udfff"], ids=ascii)
def test_a_tenant_that_is_no_text_is_refused_at_once(make, name):
    coordinator = make()
    with pytest.raises(RequestError, match="a tenant must be a text that UTF-8 has, '' for none"):
        coordinator.keeper.tenant(name)


def test_tenants_that_keep_nothing_are_forgotten(make):
    """The ones that asked longest ago, and nobody for whom pages are kept."""
    coordinator = make(max_requests=2)
    prefixes, most = coordinator.keeper, IDLE_TENANTS + 2

    def ask(name, tokens):
        with prefixes.tenant(name):
            coordinator.request_end(prefixes.begin([*range(tokens)]))

    keeping = ["acme", "beta"]
    for name in keeping:
        with prefixes.tenant(name):
            take(coordinator, [1] * 9)
    for number in range(200):
        ask(f"guest {number}", 3)
        found = prefixes.counts.tenants
        assert {*keeping, f"guest {number}"} <= {*found}
        assert len(found) <= most + len(keeping)
    guests = [f"guest {number}" for number in range(200 - most, 200)]
    assert [*found] == [*keeping, *guests]
    ask(guests[0], 4)
    assert found[guests[0]].asked == 7
    assert prefixes.counts.asked == 200 * 3 + 4 + 2 * 9
    prefixes.forget()
    for name in guests:
        ask(name, 3)
    ask("the last one", 3)
    assert not {*keeping} & {*found}
