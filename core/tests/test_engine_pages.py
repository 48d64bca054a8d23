"""Page ids that an engine gives out: the same results as with the core's own, and no page lost."""

from __future__ import annotations

import pytest
import torch

from topkv.errors import HostMemoryError, RequestError
from topkv.testing.machines.engine_pages import PAGE, PAGES, run_engine_pages
from topkv.testing.machines.lifecycle_model import DIM, HEADS, KV_HEADS, LAYERS, REQUESTS


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
    coordinator.check_integrity()


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
    """An engine may keep them as a prefix for requests to come, so they are not poisoned."""
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
