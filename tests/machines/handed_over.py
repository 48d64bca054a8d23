"""Requests that one coordinator leaves in a storage and another one goes on with.

Each run has a shelf of its own. The second must decode as the first would have, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.machines.engine_pages import SHAPE, run_forward
from topkv.coordinator import SparseCoordinator
from topkv.errors import StorageError
from topkv_prefixes import suspended
from topkv_prefixes.objects import HEADER
from topkv_prefixes.stored import StoredSession, StoredSessions
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS, doubles, make_coordinator
from topkv_testing.models.storage_doubles import SHELVES, Shelf
from topkv_testing.tiers import Tier

TOKENS = 13
"""Tokens of a prompt: three pages, and a part of a fourth."""

_numbers = itertools.count()


@contextmanager
def on_a_shelf(**options: Any) -> Iterator[tuple[Shelf, StoredSessions]]:
    """A shelf, and the sessions on it."""
    name = f"handed over {next(_numbers)}"
    shelf = SHELVES[name] = Shelf()
    try:
        with StoredSessions("shelf", {"shelf": name}, registry=doubles(), **options) as found:
            yield shelf, found
    finally:
        del SHELVES[name]


def read_prompt(coordinator: SparseCoordinator, seed: int) -> tuple[int, Callable[..., Tensor]]:
    """Make a request that has read a prompt and decoded a token.

    Returns:
        Its slot, and a function that decodes three more tokens for a slot, perhaps of another
        coordinator, and returns their outputs.
    """
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn((TOKENS + 4, *SHAPE), generator=random)
    q = torch.randn(LAYERS, TOKENS + 4, HEADS, DIM, generator=random)
    slot = coordinator.request_begin()
    run_forward(coordinator, [slot], [], {slot: rows[:TOKENS]}, q[:, :TOKENS])
    run_forward(coordinator, [], [slot], {slot: rows[TOKENS:][:1]}, q[:, TOKENS:][:, :1])

    def go_on(slot: int, on: SparseCoordinator = coordinator) -> Tensor:
        outputs = [
            run_forward(on, [], [slot], {slot: rows[at : at + 1]}, q[:, at : at + 1])
            for at in range(TOKENS + 1, TOKENS + 4)
        ]
        return torch.cat(outputs, 1)

    return slot, go_on


def leave(coordinator: SparseCoordinator, slot: int, place: StoredSession) -> None:
    """Store a request."""
    state, blocks = suspended.suspend(coordinator, slot)
    place.write({"of": "a test"}, [(state.as_dict(), blocks)])


def take(coordinator: SparseCoordinator, place: StoredSession) -> int:
    """Take over a request that goes on; return its slot."""
    found = place.read()
    assert found.document["of"] == "a test"
    return suspended.resume(coordinator, suspended.Suspended(**found.request(0)), found.blocks(0))


def run_handed_over(on: Tier, **options: Any) -> None:
    """Hand two requests over, to a coordinator that has another one."""
    with on_a_shelf() as (shelf, stored):
        first, second = make_coordinator(on, **options), make_coordinator(on, **options)
        lives = [read_prompt(first, seed) for seed in (1, 2)]
        for name, (slot, _) in zip("ab", lives, strict=True):
            leave(first, slot, stored[name])
        read_prompt(second, 3)
        for name, (slot, go_on) in [*zip("ab", lives, strict=True)][::-1]:
            expected = go_on(slot)
            ours = go_on(take(second, stored[name]), second)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        check_integrity(second)
        for name in "ab":
            stored[name].discard()
        assert not shelf.objects, "objects stay behind"
        for coordinator in (first, second):
            coordinator.close()


def run_damaged(on: Tier) -> None:
    """Damage, swap or remove one object after the other: no coordinator goes on with it."""
    with on_a_shelf() as (shelf, stored):
        first, second = make_coordinator(on), make_coordinator(on)
        slot, _ = read_prompt(first, 1)
        leave(first, slot, stored["a"])
        for key, held in [*shelf.objects.items()]:
            flipped = held[: HEADER + 1] + bytes([held[HEADER + 1] ^ 8]) + held[HEADER + 2 :]
            others = [each for each in shelf.objects.values() if each != held]
            for wrong in (flipped, others[0][: len(held)].ljust(len(held), b"\0"), None):
                shelf.objects.pop(key)
                shelf.objects |= {} if wrong is None else {key: wrong}
                with pytest.raises(StorageError, match="cannot be resumed"):
                    take(second, stored["a"])
                assert second.manager.host.used == 0, "pages are held by nobody"
                shelf.objects[key] = held
        take(second, stored["a"])
        for coordinator in (first, second):
            coordinator.close()


def run_cut_short(on: Tier) -> None:
    """Fill the storage after each number of objects: nothing of the request is left in it."""
    with on_a_shelf() as (shelf, stored):
        first = make_coordinator(on)
        slot, go_on = read_prompt(first, 1)
        leave(first, slot, stored["whole"])
        count = len(shelf.objects)
        for room in range(count):
            shelf.limit = count + room
            with pytest.raises(StorageError, match="so it is full"):
                leave(first, slot, stored["cut"])
            assert len(shelf.objects) == count, "objects stay behind"
        shelf.limit = 2 * count
        leave(first, slot, stored["cut"])
        outputs = [go_on(take(first, stored[name])) for name in ("whole", "cut")]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        first.close()


def run_interrupted(on: Tier) -> None:
    """Interrupt the storing of the head once it is stored: the name stays free."""
    with on_a_shelf() as (shelf, stored):
        ask: Any = stored.ask

        def interrupted(head: str, hook: str, *arguments: Any) -> Any:
            found = ask(head, hook, *arguments)
            if hook == "put" and len(shelf.objects) == 2:
                raise KeyboardInterrupt
            return found

        vars(stored)["ask"] = interrupted
        with pytest.raises(KeyboardInterrupt):
            stored["one"].write({}, [])
        del vars(stored)["ask"]
        assert not shelf.objects, "a session that was interrupted is not there, and has a name"
        stored["one"].write({}, [])
