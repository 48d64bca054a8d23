"""Two coordinators that are driven alike: one finds prefixes, the other computes all of them.

``run_prefixes(on)`` draws lives of requests whose prompts begin alike. They publish what they
hold, are cut back, go on with other tokens, and end, in a pool that is too small for all. Outputs
must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.kept import make_kept
from tests.machines.quotas import take
from topkv import SparseCoordinator
from topkv.errors import HostMemoryError, RequestError
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    LAYERS,
    MOST_TOKENS,
    REQUESTS,
    make_coordinator,
)
from topkv_testing.tiers import Tier


class Lives:
    """A coordinator that finds prefixes, beside one that computes all of them.

    Keys and values of a token follow from it, all tokens before it, and the salt. What is drawn
    does not depend on what was found, nor on whether the pool had room: below a storage, both are
    up to threads, and hypothesis wants the same draws again.

    Attributes:
        actions: least and most that are drawn for a life.
        counts: tokens of the prompts that are drawn.
    """

    actions = 1, 20
    counts: tuple[int, ...] = 1, 4, 5, 8, 9, 13, 17, 25, 30

    def __init__(self, on: Tier, data: st.DataObject, options: dict[str, Any]) -> None:
        self.data, self.on, self.options = data, on, options
        self.kept = self.make()
        self.plain = make_coordinator(on, max_tokens=REQUESTS * MOST_TOKENS, **options)
        self.tokens: dict[int, list[int]] = {}
        self.salt: dict[int, bytes] = {}
        self.found = 0
        self.random = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))

    def make(self) -> SparseCoordinator:
        """Make the coordinator that finds prefixes, in a pool that is too small for all."""
        return make_kept(self.on, max_tokens=48, **self.options)

    def rows(self, slot: int, first: int) -> Tensor:
        """Keys and values of the tokens of a request from position ``first`` on."""
        rows = [torch.empty(0, *SHAPE)]
        for end in range(first + 1, len(self.tokens[slot]) + 1):
            seed = sha256(self.salt[slot] + bytes(self.tokens[slot][:end])).digest()[:7]
            draw = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
            rows.append(torch.randn(1, *SHAPE, generator=draw))
        return torch.cat(rows)

    def both(self, chunks: list[int], decode: list[int], first: dict[int, int]) -> bool:
        """Run a forward on both; return False if the pool is too small for it."""
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

    def begin(self) -> None:
        prompt = [0, 1, 1] * 10
        prompt[self.data.draw(st.sampled_from([3, 11, 20, 29]), "turn")] = 2
        count = self.data.draw(st.sampled_from(self.counts), "tokens")
        salt = self.data.draw(st.sampled_from([b"", b"", b"", b"x"]), "salt")
        self.begin_with(prompt[:count], salt)

    def begin_with(self, prompt: list[int], salt: bytes) -> None:
        draw = self.data.draw
        known = self.kept.keeper.length(prompt, salt)
        most = draw(st.one_of(st.none(), st.integers(0, 30)), "most")
        slot = self.kept.keeper.begin(prompt, salt, most)
        assert self.plain.request_begin() == slot
        length = self.kept.length(slot)
        page = self.kept.config.page_tokens
        most = len(prompt) if most is None else most
        most_found = -(-most // page) * page
        assert self.is_right(length, min(known, most_found))
        assert length % page == 0
        assert length <= min(most_found, len(prompt) - 1)
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

    def is_right(self, length: int, known: int) -> bool:
        """Return True if ``length`` tokens may be found where ``known`` were known."""
        return length == known

    def decode(self) -> None:
        slots = [slot for slot in self.tokens if self.tokens[slot]]
        steps = self.data.draw(st.integers(1, 5), "steps")
        new = self.data.draw(st.integers(0, 2 ** (5 * REQUESTS) - 1), "tokens, a bit for each")
        for step in range(steps):
            slots = [slot for slot in slots if len(self.tokens[slot]) < MOST_TOKENS]
            if not slots:
                break
            first = {slot: len(self.tokens[slot]) for slot in slots}
            for slot in slots:
                self.tokens[slot] = [*self.tokens[slot], new >> step * REQUESTS + slot & 1]
            if not self.both([], slots, first):
                self.tokens |= {slot: self.tokens[slot][:-1] for slot in slots}

    def cut(self) -> None:
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
        # The ring of a request that took pages over holds what it was filled with, maybe less.
        if refused == [self.kept]:
            self.kept.truncate(slot, length)
        elif refused == [self.plain]:
            self.plain.truncate(slot, length)
        if len(refused) < 2:
            self.tokens[slot] = self.tokens[slot][:length]
        if self.data.draw(st.booleans(), "goes on"):
            self.decode()

    def rewrite(self) -> None:
        """Publish, roll back, go on with other tokens; begin another request with the old ones."""
        slot = self.slot()
        old = self.tokens[slot]
        self.kept.keeper.publish(slot, old, self.salt[slot])
        self.cut()
        if len(self.tokens) < REQUESTS:
            self.begin_with([*old[: MOST_TOKENS - 1], 0], self.salt[slot])

    def publish(self) -> None:
        slot = self.slot()
        count = self.data.draw(st.integers(0, MOST_TOKENS), "published at most")
        self.kept.keeper.publish(slot, self.tokens[slot][:count], self.salt[slot])

    def end(self) -> None:
        slot = self.slot()
        if self.data.draw(st.booleans(), "keeps"):
            self.kept.keeper.publish(slot, self.tokens[slot], self.salt[slot])
        for coordinator in (self.kept, self.plain):
            coordinator.request_end(slot)
        del self.tokens[slot]

    def slot(self) -> int:
        return self.data.draw(st.sampled_from([*self.tokens]), "slot")

    def act(self) -> None:
        does = [self.begin] * 4 if len(self.tokens) < REQUESTS else []
        if self.tokens:
            does += [self.decode, self.rewrite, self.cut, self.publish, self.end, self.end]
        does += [self.kept.keeper.forget, *self.further()]
        self.data.draw(st.sampled_from(does), "action")()
        check_integrity(self.kept)

    def further(self) -> list[Callable[[], None]]:
        """Further actions that may be drawn."""
        return []

    def close(self) -> None:
        for slot in self.tokens:
            self.kept.request_end(slot)
        assert self.kept.manager.host.used == 0
        assert self.kept.keeper.counts.found == self.found
        self.kept.keeper.forget()
        assert self.kept.keeper.counts.kept == 0


def run_prefixes(
    on: Tier, lives_of: type[Lives] = Lives, examples_of: tuple[int, int] = (60, 6), **options: Any
) -> int:
    """Draw lives until hypothesis has seen enough; ``options`` are those of ``SparseConfig``.

    Args:
        on: where they run.
        lives_of: class of the lives.
        examples_of: how many on a CPU, and in the interpreter.

    Returns:
        Tokens that were found.
    """
    found, (cpu, interpret) = 0, examples_of

    @settings(examples(on, cpu=cpu, interpret=interpret), phases=[Phase.explicit, Phase.generate])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal found
        lives = lives_of(on, data, options)
        try:
            for _ in range(data.draw(st.integers(*lives_of.actions), "actions")):
                lives.act()
            lives.close()
            found += lives.found
        finally:
            lives.kept.close()
            lives.plain.close()

    check()
    return found


def run_again(on: Tier) -> None:
    """Repeat a prompt that ends with a page: its last page is computed, for its last row."""
    coordinator = make_kept(on)
    assert [take(coordinator, [1] * 8) for _ in range(2)] == [0, 4]
    coordinator.close()
