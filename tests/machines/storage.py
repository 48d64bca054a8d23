"""Lives of requests over a storage: objects are fetched, lost, damaged, or of earlier processes.

``run_storage(on)`` draws lives as ``run_prefixes`` does, over a coordinator that ends and begins
anew while its storage stays. Objects are flipped, cut, swapped and taken away, the storage fails,
fills up, or is slow; outputs must be those of a coordinator that computes everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.kept import make_kept
from tests.machines.prefixes import Lives, run_prefixes
from topkv import SparseCoordinator
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS
from topkv_testing.models.storage_doubles import SHELVES, Shelf
from topkv_testing.tiers import Tier

WRITES = ("write_through", "write_through_selective", "write_back")

DAMAGES = st.tuples(
    st.integers(0, 2**16),
    st.sampled_from(["flip", "cut", "swap", "drop", "header"]),
    st.integers(0, 2**16),
)
"""Damages: number of an object, what happens to it, and where."""

_numbers = itertools.count()


class StoredLives(Lives):
    """Lives over a shelf."""

    actions = 12, 24
    counts = 9, 17, 25, 30

    def __init__(self, on: Tier, data: st.DataObject, options: dict[str, Any]) -> None:
        self.name = f"lives {next(_numbers)}"
        self.shelf = SHELVES[self.name] = Shelf(limit=data.draw(st.sampled_from([6, 1000])))
        self.write = data.draw(st.sampled_from(WRITES), "write")
        self.racing = data.draw(st.booleans(), "pages are written while they are stored")
        self.fetched = 0
        super().__init__(on, data, options)

    def make(self) -> SparseCoordinator:
        storage = {
            "name": "shelf",
            "params": {"shelf": self.name},
            "write": self.write,
            "fetch": "wait_complete",
            "least_tokens": 1,
            "limit_s": 60,
        }
        return make_kept(self.on, {"storage": storage}, max_tokens=48, **self.options)

    def begin_with(self, prompt: list[int], salt: bytes) -> None:
        if self.data.draw(st.booleans(), "prefetch"):
            self.kept.keeper.prefetch(prompt, salt)
        self.kept.keeper.fetch(prompt, salt)
        super().begin_with(prompt, salt)

    def is_right(self, length: int, known: int) -> bool:
        """Return True if at least ``known`` tokens are found: a failed call may be made again."""
        return length >= known

    def act(self) -> None:
        super().act()
        if not self.racing:
            self.stored.wait()

    @property
    def stored(self) -> Any:
        return self.kept.keeper.storage

    def further(self) -> list[Callable[[], None]]:
        return [self.fail, self.restart, self.restart, self.damage, self.damage]

    def restart(self) -> None:
        """End all requests, and go on with another coordinator over the storage."""
        for slot in [*self.tokens]:
            self.kept.keeper.publish(slot, self.tokens[slot], self.salt[slot])
            self.kept.request_end(slot)
            self.plain.request_end(slot)
        self.tokens.clear()
        self.end_kept()
        self.kept = self.make()
        self.begin()

    def end_kept(self) -> None:
        """Close the coordinator, and assert that no page is held."""
        assert self.kept.manager.host.used == 0, "pages are held by nobody"
        self.found = 0
        self.kept.close()
        self.fetched += self.stored.counts.fetched

    def damage(self) -> None:
        """Damage objects, and let another coordinator find them."""
        # What is there by now is up to threads: nothing that is drawn may depend on it.
        damages = self.data.draw(st.lists(DAMAGES, min_size=1, max_size=3), "damages")
        self.stored.wait()
        objects = self.shelf.objects
        for which, kind, place in damages if objects else ():
            keys = sorted(objects) or [b""]
            key = keys[which % len(keys)]
            held = bytearray(objects.pop(key, b"")) or bytearray(1)
            at = place % len(held)
            match kind:
                case "flip":
                    held[at] ^= 1 << which % 8
                case "header":
                    held[at % 128] ^= 0x10
                case "cut":
                    del held[at:]
                case "swap":
                    held = bytearray(objects.get(keys[place % len(keys)], held))
            if kind != "drop":
                objects[key] = bytes(held)
        self.restart()

    def fail(self) -> None:
        """Make some of the next calls raise."""
        left = iter(
            self.data.draw(st.lists(st.booleans(), min_size=1, max_size=3), "calls that fail")
        )

        def before(call: str, keys: Sequence[bytes]) -> None:
            if next(left, False):
                raise OSError("the shelf has fallen down")

        self.shelf.before = before

    def close(self) -> None:
        for slot in [*self.tokens]:
            self.kept.request_end(slot)
        self.tokens.clear()
        self.stored.wait()
        self.end_kept()
        del SHELVES[self.name]


def run_storage(on: Tier, cpu: int = 30, interpret: int = 1, **options: Any) -> int:
    """Draw lives until hypothesis has seen enough.

    Args:
        on: where they run.
        cpu, interpret: how many on a CPU, and in the interpreter.
        options: those of ``SparseConfig``.

    Returns:
        Pages that came from the storage.
    """
    fetched = 0

    class Counted(StoredLives):
        def close(self) -> None:
            nonlocal fetched
            super().close()
            fetched += self.fetched

    run_prefixes(on, Counted, (cpu, interpret), **options)
    return fetched


@contextmanager
def scene(on: Tier, **storage: Any) -> Iterator[tuple[Shelf, Callable[..., Any], Tensor]]:
    """Yield a shelf, a function that makes coordinators over it, and keys and values
    ``[3, 12, L, 2, Hkv, D]`` of three prompts."""
    name = f"scene {next(_numbers)}"
    shelf = SHELVES.setdefault(name, Shelf())
    asked = {"name": "shelf", "params": {"shelf": name}, "least_tokens": 1, **storage}
    make = partial(make_kept, on, {"storage": asked})
    rows = torch.randn((3, 12, *SHAPE), generator=torch.Generator().manual_seed(1))
    try:
        yield shelf, make, rows
    finally:
        del SHELVES[name]


def read(coordinator: SparseCoordinator, tokens: list[int], rows: Tensor) -> tuple[int, Tensor]:
    """Begin with a prompt of 12 tokens and decode one behind it.

    Returns:
        Tokens that were found, and outputs of the last one.
    """
    slot = coordinator.keeper.begin([*tokens, 0])
    found = coordinator.length(slot)
    q = torch.ones(LAYERS, 12, HEADS, DIM)
    if found < 12:
        run_forward(coordinator, [slot], [], {slot: rows[found:]}, q[:, found:])
    output = run_forward(coordinator, [], [slot], {slot: rows[:1]}, q[:, :1])
    coordinator.truncate(slot, 12)
    coordinator.keeper.publish(slot, tokens)
    coordinator.request_end(slot)
    return found, output


def run_overtaken(on: Tier) -> None:
    """Publish a page, and write it again before a thread has stored it.

    A later request with its first tokens must not find the second ones.
    """
    gate = Event()
    with scene(on) as (shelf, make, rows):

        def before(call: str, keys: Sequence[bytes]) -> None:
            if call == "put":
                gate.wait(60)

        shelf.before = before
        writing = make()
        try:
            q = torch.ones(LAYERS, 12, HEADS, DIM)
            first, second = writing.request_begin(), writing.request_begin()
            for slot in (first, second):
                run_forward(writing, [slot], [], {slot: rows[slot]}, q)
                writing.keeper.publish(slot, [slot] * 12)
            writing.truncate(second, 0)
            run_forward(writing, [second], [], {second: rows[2]}, q)
        finally:
            gate.set()
            writing.close()
        _, ours = read(make(), [second] * 12, rows[second])
        _, expected = read(make_kept(on), [second] * 12, rows[second])
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def run_reloaded(on: Tier, damage: bool = False) -> None:
    """Store a page, damage it perhaps, and let another coordinator take it over."""
    with scene(on) as (shelf, make, rows):
        writing = make()
        _, expected = read(writing, [1] * 12, rows[0])
        writing.close()
        for key, held in shelf.objects.items() if damage else ():
            shelf.objects[key] = held[:4200] + bytes([held[4200] ^ 0x40]) + held[4201:]
        found, ours = read(make(), [1] * 12, rows[0])
    assert found == (0 if damage else 12)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def run_evicted(on: Tier) -> None:
    """Evict pages from the host pool for another prompt, and fetch them again."""
    with scene(on, write="write_back") as (_, make, rows):
        coordinator = make(max_tokens=16, max_request_tokens=16, max_requests=1)
        _, expected = read(coordinator, [1] * 12, rows[0])
        read(coordinator, [2] * 12, rows[1])
        coordinator.keeper.storage.wait()
        found, ours = read(coordinator, [1] * 12, rows[0])
        assert found == 12
        coordinator.close()
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
