"""Pages that outlive their requests: found by their tokens, and what they hold is theirs."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from topkv.errors import HostMemoryError, RequestError
from topkv.kv.prefix import PrefixPages, page_keys
from topkv.testing.kit import examples
from topkv.testing.machines.engine_pages import PAGE, SHAPE, run_forward
from topkv.testing.machines.host_pool import HostPoolMachine
from topkv.testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    LAYERS,
    MOST_TOKENS,
    REQUESTS,
    make_coordinator,
)


class UnpublishedMachine(HostPoolMachine):
    """Where nothing is published, pages are those of any allocator."""

    def make(self, num_pages):
        return PrefixPages(num_pages)


class PublishedMachine(RuleBasedStateMachine):
    """Requests of pages that are published, against a list of what is kept, oldest first."""

    @initialize(num_pages=st.integers(2, 9))
    def start(self, num_pages):
        self.pool, self.total, self.gone = PrefixPages(num_pages), num_pages - 1, []
        self.pool.on_evict = self.gone.extend
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
        """What is found can be held again."""
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
            self.pool.check_integrity(self.held)


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


class Lives:
    """A coordinator that finds prefixes, beside one that computes all of them.

    Keys and values of a token follow from it, all tokens before it, and the salt.
    """

    def __init__(self, on, data, options):
        self.data = data
        self.kept = make_coordinator(on, max_tokens=48, **options)
        self.plain = make_coordinator(on, max_tokens=REQUESTS * MOST_TOKENS, **options)
        self.tokens, self.salt, self.found = {}, {}, 0
        self.random = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))

    def rows(self, slot, first):
        """Keys and values of the tokens of a request from position ``first`` on."""
        rows = [torch.empty(0, *SHAPE)]
        for end in range(first + 1, len(self.tokens[slot]) + 1):
            seed = sha256(self.salt[slot] + bytes(self.tokens[slot][:end])).digest()[:7]
            draw = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
            rows.append(torch.randn(1, *SHAPE, generator=draw))
        return torch.cat(rows)

    def both(self, chunks, decode, first):
        """A forward on both; False if the pool is too small for it."""
        new = {slot: self.rows(slot, first[slot]) for slot in (*decode, *chunks)}
        count = sum(map(len, new.values()))
        q = torch.randn(LAYERS, count, HEADS, DIM, generator=self.random)
        try:
            ours = run_forward(self.kept, chunks, decode, new, q)
        except HostMemoryError:
            return False
        expected = run_forward(self.plain, chunks, decode, new, q)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        return True

    def begin(self):
        prompt = [0, 1, 1] * 10
        prompt[self.data.draw(st.sampled_from([3, 11, 20, 29]), "turn")] = 2
        count = self.data.draw(st.sampled_from([1, 4, 5, 8, 9, 13, 17, 25, 30]), "tokens")
        salt = self.data.draw(st.sampled_from([b"", b"", b"", b"x"]), "salt")
        self.begin_with(prompt[:count], salt)

    def begin_with(self, prompt, salt):
        draw = self.data.draw
        known = self.kept.prefixes.length(prompt, salt)
        most = draw(st.one_of(st.none(), st.integers(0, 30)), "most")
        slot = self.kept.prefixes.begin(prompt, salt, most)
        assert self.plain.request_begin() == slot
        length = self.kept.length(slot)
        page = self.kept.config.page_tokens
        most = len(prompt) if most is None else most
        assert length == min(known, -(-most // page) * page) < len(prompt)
        self.found += length
        if most < length:
            length = most
            self.kept.truncate(slot, length)
        self.tokens[slot], self.salt[slot] = prompt[:length], salt
        if length:  # the other one computes them
            new = {slot: self.rows(slot, 0)}
            run_forward(self.plain, [slot], [], new, torch.zeros(LAYERS, 0, HEADS, DIM))
        self.tokens[slot] = prompt
        if not self.both([slot], [], {slot: length}):
            self.tokens[slot] = prompt[:length]

    def decode(self):
        slots = [slot for slot in self.tokens if 0 < len(self.tokens[slot]) < MOST_TOKENS]
        for _ in range(self.data.draw(st.integers(1, 5), "steps") if slots else 0):
            slots = [slot for slot in slots if len(self.tokens[slot]) < MOST_TOKENS]
            first = {slot: len(self.tokens[slot]) for slot in slots}
            for slot in slots:
                self.tokens[slot] = [*self.tokens[slot], self.data.draw(st.integers(0, 1))]
            if not self.both([], slots, first):
                self.tokens |= {slot: self.tokens[slot][:-1] for slot in slots}

    def cut(self):
        slot = self.slot()
        held = len(self.tokens[slot])
        length = held - min(held, self.data.draw(st.sampled_from([0, 1, 2, 3, 5, 9, 30]), "cut"))
        call = self.data.draw(st.sampled_from(["rollback", "truncate"]), "call")
        refused = []
        for coordinator in (self.kept, self.plain):
            try:
                getattr(coordinator, call)(slot, length)
            except RequestError:  # the ring does not reach back as far
                refused.append(coordinator)
        # The ring of a request that took pages over holds what it was filled with, so may less.
        if refused == [self.kept]:
            self.kept.truncate(slot, length)
        elif refused == [self.plain]:
            self.plain.truncate(slot, length)
        if len(refused) < 2:
            self.tokens[slot] = self.tokens[slot][:length]
        if self.data.draw(st.booleans(), "goes on"):
            self.decode()

    def rewrite(self):
        """Publish, go back and on with other tokens, and begin with the old ones elsewhere."""
        slot = self.slot()
        old = self.tokens[slot]
        self.kept.prefixes.publish(slot, old, self.salt[slot])
        self.cut()
        if len(self.tokens) < REQUESTS and len(old) < MOST_TOKENS:
            self.begin_with([*old, 0], self.salt[slot])

    def publish(self):
        slot = self.slot()
        count = self.data.draw(st.integers(0, len(self.tokens[slot])), "published")
        self.kept.prefixes.publish(slot, self.tokens[slot][:count], self.salt[slot])

    def end(self):
        slot = self.slot()
        if self.data.draw(st.booleans(), "keeps"):
            self.kept.prefixes.publish(slot, self.tokens[slot], self.salt[slot])
        for coordinator in (self.kept, self.plain):
            coordinator.request_end(slot)
        del self.tokens[slot]

    def slot(self):
        return self.data.draw(st.sampled_from([*self.tokens]), "slot")

    def act(self):
        does = [self.begin] * 4 if len(self.tokens) < REQUESTS else []
        if self.tokens:
            does += [self.decode, self.rewrite, self.cut, self.publish, self.end, self.end]
        does += [self.kept.prefixes.forget] if self.found else []
        self.data.draw(st.sampled_from(does), "action")()
        self.kept.check_integrity()

    def close(self):
        for slot in self.tokens:
            self.kept.request_end(slot)
        assert self.kept.manager.host.used == 0
        assert self.kept.prefixes.counts.found == self.found
        self.kept.prefixes.forget()
        assert self.kept.prefixes.counts.kept == 0


@pytest.mark.parametrize("page", [PAGE, 8])
def test_requests_go_on_as_if_they_had_computed_what_they_found(on, page):
    found = 0

    @settings(examples(on, cpu=60, interpret=6), phases=[Phase.explicit, Phase.generate])
    @given(st.data())
    def check(data):
        nonlocal found
        lives = Lives(on, data, {"page_tokens": page})
        try:
            for _ in range(data.draw(st.integers(1, 20), "actions")):
                lives.act()
            lives.close()
            found += lives.found
        finally:
            lives.kept.close()
            lives.plain.close()

    check()
    assert found > (50 if on.name == "cpu" else 10)
