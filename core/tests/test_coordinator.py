"""The coordinator: whole lives of requests on every tier, and single calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.machines.lifecycle import run_lifecycle
from tests.machines.scenarios import (
    SCENARIOS,
    copies_come_late,
    drafts_are_appended_and_rejected,
    run_scenario,
)
from topkv.errors import ConfigError, HostMemoryError
from topkv.prompts.prefill import Prefill
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    make_coordinator,
)
from topkv_testing.tiers import tier

CPU = tier("cpu")


def make(**options):
    """Make a coordinator: two sparse layers around a resident and a streamed one."""
    return make_coordinator(CPU, **options)


def test_lifecycle(on):
    run_lifecycle(on)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "lru"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, fast, on):
    run_scenario(scenario, on, fast=fast, unit=2, buffer=12, prompts=16 if fast else None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("verification", ["joint", "exact"])
@pytest.mark.parametrize("queries", [2, 3, 8])
def test_drafts(queries, verification, on):
    options = {"queries": queries, "verification": verification, "page": 4}
    kinds = ((False, 2, "FS"), (True, 4, "F"), (False, 1, "F"))
    for fast, unit, share in kinds[: 1 if on.name == "interpret" else None]:
        run_scenario(
            drafts_are_appended_and_rejected,
            on,
            fast=fast,
            unit=unit,
            buffer=12,
            share=share,
            **options,
        )


@pytest.mark.gpu
def test_copies_come_late():
    run_scenario(copies_come_late, tier("gpu"), unit=2, buffer=12, fast=False)


@pytest.mark.gpu
def test_a_missing_wait_shows_when_copies_come_late(monkeypatch):
    monkeypatch.setattr(Prefill, "join", lambda self: None)
    with pytest.raises(AssertionError):
        run_scenario(copies_come_late, tier("gpu"), unit=2, buffer=12, fast=False)


def test_what_inference_mode_made_is_written_outside_of_it(on):
    """Inference tensors could not be written: neither here, nor by threads that touch the pool."""
    with torch.inference_mode():
        coordinator = make_coordinator(on)
    slot = coordinator.request_begin()
    for begin, rows in (({"prefill": [(slot, 5)]}, 5), ({"decode": [slot]}, 1)):
        coordinator.forward_begin(**begin)
        for layer in range(LAYERS):
            q, k, v = (
                torch.ones(rows, heads, DIM, device=on.device)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            torch.testing.assert_close(coordinator.attention(layer, q, k, v), torch.ones_like(q))
        coordinator.forward_end()
    assert coordinator.length(slot) == 6
    coordinator.close()


def test_can_admit_names_every_reason():
    coordinator = make()
    assert coordinator.can_admit(48, 2)
    answer = coordinator.can_admit(49, 5)
    assert not answer
    assert len(answer.reasons) == 3
    coordinator.close()


def test_reserve_refuses_and_changes_nothing():
    coordinator = make()
    slots = [coordinator.request_begin() for _ in range(3)]
    coordinator.reserve(slots[0], 48)
    coordinator.reserve(slots[1], 48)
    with pytest.raises(HostMemoryError, match="pages of the host pool are needed"):
        coordinator.reserve(slots[2], 48)
    check_integrity(coordinator)
    assert coordinator.requests.pages.of(slots[2]) == []
    coordinator.close()


def test_padded_rows_and_rows_that_append_nothing_change_nothing():
    coordinator = make()
    slot = coordinator.request_begin()
    generator = torch.Generator().manual_seed(0)

    def tokens(count, heads):
        return torch.randn(count, heads, DIM, generator=generator)

    coordinator.forward_begin(prefill=[(slot, 9)])
    for layer in range(LAYERS):
        coordinator.attention(layer, tokens(9, HEADS), tokens(9, KV_HEADS), tokens(9, KV_HEADS))
    coordinator.forward_end()
    store = coordinator.manager.stores[0]
    before = [t.clone() for t in (store.buffer, store.entries, store.unit_slot, store.order)]
    rows = np.array([-1, slot])
    coordinator.forward_begin(decode=rows, append=[False, False])
    for layer in range(LAYERS):
        out = coordinator.attention(
            layer, tokens(2, HEADS), tokens(2, KV_HEADS), tokens(2, KV_HEADS)
        )
        assert (out[0] == 0).all()
        assert out[1].isfinite().all()
    coordinator.forward_end()
    after = (store.buffer, store.entries, store.unit_slot, store.order)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)
    assert coordinator.length(slot) == 9
    coordinator.close()


def test_a_tail_that_competes_takes_its_share_of_the_budget():
    coordinator = make(unit=1, budget=8, buffer=8, ring_tokens=3, algorithm="competing")
    lanes = coordinator.layers[0].lanes
    coordinator.forward_begin(decode=[-1])
    assert lanes.tables.table.shape[1] == lanes.selection.ids.shape[1] == 8
    coordinator.forward_end()
    coordinator.close()
    with pytest.raises(ConfigError, match="raise buffer to 8 or"):
        make(unit=1, budget=8, buffer=7, ring_tokens=3, algorithm="competing")


def test_a_tail_that_competes_does_not_widen_the_selection_beyond_what_plans_count():
    sizes = {"budget": 2**15, "buffer": 2**15, "max_tokens": 2**15, "max_request_tokens": 2**15}
    with pytest.raises(ConfigError, match="must stay below 32768 units, got 32768"):
        make(unit=1, ring_tokens=3, algorithm="competing", **sizes)
