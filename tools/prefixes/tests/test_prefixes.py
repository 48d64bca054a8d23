"""Pages that outlive their requests: found by their tokens, and what they hold is theirs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.machines.engine_pages import PAGE
from tests.machines.host_pool import HostPoolMachine
from tests.machines.prefixes import run_prefixes
from topkv.errors import HostMemoryError, RequestError
from topkv_prefixes.pages import PrefixPages, page_keys
from topkv_testing.integrity import check_pages


class UnpublishedMachine(HostPoolMachine):
    """Where nothing is published, pages are those of any allocator."""

    def make(self, num_pages):
        return PrefixPages(num_pages)


class PublishedMachine(RuleBasedStateMachine):
    """Requests of pages that are published, against a list of what is kept, oldest first."""

    @initialize(num_pages=st.integers(2, 9))
    def start(self, num_pages):
        self.pool, self.total, self.gone = PrefixPages(num_pages), num_pages - 1, []
        self.pool.on_evict = lambda pages, keys: self.gone.extend(pages)
        self.held, self.known, self.kept, self.evicted = [], {}, [], 0

    def is_held(self, page):
        return any(page in pages for pages in self.held)

    @rule(count=st.integers(0, 6), first=st.sampled_from([None, 0, 1, 2]))
    def lease(self, count, first):
        """A request, which may publish its pages at once."""
        used = {page for pages in self.held for page in pages}
        if count > self.total - len(used):
            with pytest.raises(HostMemoryError):
                self.pool.lease(count)
            return
        short = max(0, count - (self.total - len(used) - len(self.kept)))
        oldest, self.kept = self.kept[:short], self.kept[short:]
        self.known = {key: page for key, page in self.known.items() if page not in oldest}
        self.gone.clear()
        pages = self.pool.lease(count)
        assert self.gone == oldest
        assert not {*pages} & ({*self.known.values()} | used)
        self.evicted += short
        self.held.append(pages)
        if first is not None:
            self.publish(pages, first)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), first=st.integers(0, 2))
    def publish_later(self, data, first):
        self.publish(data.draw(st.sampled_from(self.held)), first)

    def publish(self, pages, first):
        keys = [bytes([first, place]) for place in range(len(pages))]
        self.pool.publish(pages, keys)
        for page, key in zip(pages, keys, strict=True):
            if key not in self.known and page not in self.known.values():
                self.known[key] = page

    @rule(first=st.integers(0, 2), count=st.integers(1, 6))
    def find(self, first, count):
        """Pages that are found can be held again."""
        keys = [bytes([first, place]) for place in range(count)]
        known = [key in self.known for key in keys]
        there = keys[: known.index(False)] if False in known else keys
        pages = self.pool.find(keys)
        assert pages == [self.known[key] for key in there]
        if len({*pages}) == len(pages):
            self.pool.share(pages)
            self.kept = [page for page in self.kept if page not in pages]
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data, twice):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        freed = self.pool.release(pages)
        idle = [page for page in reversed(pages) if not self.is_held(page)]
        kept = [page for page in idle if page in self.known.values()]
        assert sorted(freed) == sorted({*idle} - {*kept})
        self.kept += kept
        if kept and twice:
            with pytest.raises(RequestError, match="is not leased"):
                self.pool.release(kept[:1])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def withdraw(self, data):
        page = data.draw(st.integers(1, self.total))
        self.pool.withdraw([page])
        self.known = {key: each for key, each in self.known.items() if each != page}
        self.kept = [each for each in self.kept if each != page]

    @precondition(lambda self: len(self.kept) > 2)
    @rule()
    def forget(self):
        assert self.pool.forget() == self.kept
        self.known, self.kept = {}, []

    @invariant()
    def adds_up(self):
        if hasattr(self, "pool"):
            used = {page for pages in self.held for page in pages}
            assert (self.pool.used, self.pool.free) == (len(used), self.total - len(used))
            assert (self.pool.kept, self.pool.evicted) == (len(self.kept), self.evicted)
            check_pages(self.pool, self.held)


@pytest.mark.parametrize("machine", [UnpublishedMachine, PublishedMachine])
def test_pages(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=25, deadline=None)
    )


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_keys_are_equal_where_all_tokens_up_to_there_are(one, other):
    keys = [page_keys(tokens, 3, b"") for tokens in (one, other)]
    assert [len(each) for each in keys] == [len(one) // 3, len(other) // 3]
    for place, (mine, yours) in enumerate(zip(*keys, strict=False)):
        end = 3 * place + 3
        assert (mine == yours) == (one[:end] == other[:end])
    assert not {*keys[0]} & {*page_keys(one, 3, b"x")}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE, 8])
def test_requests_go_on_as_if_they_had_computed_what_they_found(on, page):
    found = run_prefixes(on, examples_of=(120, 40), page_tokens=page)
    assert found > (50 if on.name == "cpu" else 0)
