"""Page ids of an engine: results as with the core's own, and no page lost."""

from __future__ import annotations

import os
import random

import pytest
import torch
from attrs import evolve

from tests.machines.engine_pages import PAGE, PAGES, SHAPE, run_engine_pages, run_forward
from topkv import SparseCoordinator
from topkv.errors import ConfigError, HostMemoryError, RequestError
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    REQUESTS,
    doubles,
    make_coordinator,
)


@pytest.mark.slow
def test_results_are_those_of_pages_of_the_core(on):
    run_engine_pages(on)


@pytest.mark.parametrize(
    ("pages", "length", "reason"),
    [
        ([0], 0, r"must be 1 to 28, got \[0\]"),
        ([3, 29], 0, r"must be 1 to 28, got \[29\]"),
        ([3], 8, "at most 4, the tokens of the 1 pages, got 8"),
        ([3], 2, "multiple of page_tokens = 4"),
        (range(1, 14), 0, "at most 12 pages, got 13 behind its 0"),
    ],
    ids=["page 0", "no such page", "too long", "part of a page", "too many"],
)
def test_pages_that_cannot_be_are_refused(make, pages, length, reason):
    coordinator = make(pages="engine")
    with pytest.raises(RequestError, match=reason):
        coordinator.request_begin(pages, length)
    assert coordinator.requests.free == REQUESTS
    assert coordinator.manager.host.used == 0
    check_integrity(coordinator)


def test_a_prompt_that_an_algorithm_has_to_see_is_refused(make):
    coordinator = make(pages="engine")
    coordinator.requests.shares_prefixes = False  # as a spec says whose prefix is "replay"
    assert coordinator.request_begin([3]) == 0
    with pytest.raises(RequestError, match="keeps more of a prompt than"):
        coordinator.request_begin([3], PAGE)


def test_tokens_without_a_page_are_refused(make):
    coordinator = make(pages="engine")
    slot = coordinator.request_begin([3])
    with pytest.raises(HostMemoryError, match="1 pages are needed that the engine has not"):
        coordinator.forward_begin(prefill=[(slot, PAGE + 1)])
    coordinator.request_add_pages(slot, [7])
    coordinator.forward_begin(prefill=[(slot, PAGE + 1)])
    coordinator.forward_abort()
    assert not coordinator.can_admit(PAGE * (PAGES - 2))


def test_a_fork_shares_full_pages_and_is_refused_an_open_one(make):
    coordinator = make(pages="engine")
    slot = coordinator.request_begin([3, 5], PAGE)
    twin = coordinator.fork(slot)
    assert coordinator.requests.pages.of(twin) == [3]
    coordinator.requests.length[slot] += 1  # as after a token
    with pytest.raises(HostMemoryError, match="fork where a page is full"):
        coordinator.fork(slot)
    assert coordinator.requests.free == REQUESTS - 2


def test_pages_outlive_the_request_that_filled_them(make):
    """Pages are not poisoned: an engine may keep them as a prefix for later requests."""
    coordinator = make(pages="engine")
    assert coordinator.config.poison
    outputs = []
    for length in (0, 2 * PAGE):
        slot = coordinator.request_begin([3, 5, 7], length)
        random = torch.Generator().manual_seed(1)
        for count in (2 * PAGE, 3):
            rows = torch.randn(3, LAYERS, count, HEADS, DIM, generator=random)
            if count == 2 * PAGE and length:
                continue  # they are there
            coordinator.forward_begin(prefill=[(slot, count)])
            for layer in range(LAYERS):
                q, k, v = rows[:, layer]
                outputs.append(coordinator.attention(layer, q, k[:, :KV_HEADS], v[:, :KV_HEADS]))
            coordinator.forward_end()
        coordinator.request_end(slot)
    for one, other in zip(outputs[LAYERS : 2 * LAYERS], outputs[2 * LAYERS :], strict=True):
        assert torch.equal(one, other)
    assert coordinator.manager.host.used == 0


@pytest.fixture
def twins(on):
    """One coordinator, and two more whose host pool is one file."""
    registry = doubles()
    alone = make_coordinator(on, registry=registry, pages="engine", buffer=8)
    file = os.memfd_create("topkv-twins")
    config = evolve(alone.config, host_file=file)
    made = [alone, *(SparseCoordinator(config, registry) for _ in range(2))]
    os.close(file)
    yield made
    for coordinator in made:
        coordinator.close()


def test_two_that_share_a_pool_do_what_one_does(twins, on):
    """Requests come and go and use each other's pages, each step in another order of the two; the
    second reads what the first has written last."""
    draw, rows = random.Random(3), torch.Generator().manual_seed(3)
    free, held, lengths = list(range(1, PAGES)), {}, {}
    for step in range(15 if on.name == "interpret" else 60):
        if len(held) < REQUESTS and draw.random() < 0.4:
            (slot,) = {each.request_begin() for each in twins}
            held[slot], lengths[slot] = [], 0
        if not held:
            continue
        new = {slot: draw.choice([3, 7, 9]) if not lengths[slot] else 1 for slot in held}
        for slot, tokens in new.items():
            missing = -(-(lengths[slot] + tokens) // PAGE) - len(held[slot])
            pages = [free.pop(draw.randrange(len(free))) for _ in range(missing)]
            held[slot] += pages
            for each in twins:
                each.request_add_pages(slot, pages)
        decode = [slot for slot in held if lengths[slot]]
        chunks = [slot for slot in held if not lengths[slot]]
        new = {slot: torch.randn((n, *SHAPE), generator=rows) for slot, n in new.items()}
        q = torch.randn(LAYERS, sum(map(len, new.values())), HEADS, DIM, generator=rows)
        order = [twins[0], *draw.sample(twins[1:], 2)]
        expected, *got = [run_forward(each, chunks, decode, new, q) for each in order]
        assert all(torch.equal(expected, each) for each in got), step
        for slot in [*held]:
            lengths[slot] += len(new[slot])
            if lengths[slot] >= 12 and draw.random() < 0.5:
                for each in twins:
                    each.request_end(slot)
                free += held.pop(slot)
                del lengths[slot]
    _, one, other = twins
    assert one.transfers_of().misses == twins[0].transfers_of().misses > 0
    assert one.manager.host.bytes.data_ptr() != other.manager.host.bytes.data_ptr()
    assert torch.equal(one.manager.host.bytes, other.manager.host.bytes)
    one.manager.host.bytes[0] += 1  # of page 0, which nobody has
    assert torch.equal(one.manager.host.bytes, other.manager.host.bytes)


def test_pages_of_the_core_cannot_be_shared(make):
    with pytest.raises(ConfigError, match="host_file wants pages 'engine', got 'core'"):
        evolve(make().config, host_file=0)
