"""A scene of tenants: pages kept for each are its own, and no more than its quota."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.kept import make_kept
from topkv import SparseCoordinator
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS
from topkv_testing.tiers import Tier


def take(coordinator: SparseCoordinator, tokens: Sequence[int]) -> int:
    """Run a request of these tokens and publish them; return how many of them it found."""
    slot = coordinator.keeper.begin(tokens)
    found = coordinator.length(slot)
    new = {slot: torch.ones(len(tokens) - found, *SHAPE)}
    q = torch.ones(LAYERS, len(tokens) - found, HEADS, DIM)
    run_forward(coordinator, [slot], [], new, q)
    coordinator.keeper.publish(slot, tokens)
    coordinator.request_end(slot)
    return found


def run_quota_scene(on: Tier) -> None:
    """Keep three pages for one tenant, any number for another, while a running request holds more
    than either."""
    page = make_kept(on).manager.host
    size = page.bytes.numel() // page.num_pages
    coordinator = make_kept(on, {"quotas": {"a": 3 * size + 1}})
    prefixes = coordinator.keeper
    with prefixes.tenant("b"):
        take(coordinator, [9] * 16)
    with prefixes.tenant("a"):
        running = prefixes.begin([5] * 24)
        new = {running: torch.ones(24, *SHAPE)}
        run_forward(coordinator, [running], [], new, torch.ones(LAYERS, 24, HEADS, DIM))
        prefixes.publish(running, [5] * 24)
        assert prefixes.length([5] * 24) == 20, "what a request holds is no matter of quotas"
        take(coordinator, [1] * 8)
        take(coordinator, [2] * 8)
        kept = prefixes.counts.tenants["a"]
        assert (kept.kept, kept.kept_bytes, kept.evicted) == (3, 3 * size, 1)
        # The last page of the older prompt went.
        assert [prefixes.length([n] * 9) for n in (1, 2)] == [4, 8]
        coordinator.request_end(running)
        assert prefixes.counts.tenants["a"].kept == 3
        assert prefixes.length([5] * 24) == 12, "the first pages of what was used last"
    with prefixes.tenant("b"):
        assert prefixes.length([9] * 17) == 16, "nobody else's pages went"
    with prefixes.tenant("c"):
        assert prefixes.length([5] * 24) == 0, "nobody else's pages are found"
    check_integrity(coordinator)
    coordinator.close()
