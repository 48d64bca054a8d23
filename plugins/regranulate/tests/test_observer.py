"""The observer under the conformance kit, and what it counts."""

from __future__ import annotations

import pytest
import torch

from tests.machines.regrained import SCRIPTED_TOKENS
from topkv_regranulate import entry
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    doubles,
    make_coordinator,
)
from topkv_testing.observers import ObserverOptions, ObserverTests
from topkv_testing.tiers import tier

UNIT, SELECT = 4, 5
IDS = torch.tensor([[13, 12, 7, -1, 5], [3, 0, 1, 2, 11]]).int()
EXTRA = (4 - 2) + (8 - 5)
"""Tokens of unit 1 beside 5 and 7, and of units 0 and 2 beside 0 to 3 and 11."""


class TestExtraTokens(ObserverTests):
    @pytest.fixture
    def plugin(self):
        (observer,) = entry.topkv_register_observers()
        return observer

    @pytest.fixture
    def options(self):
        """Nothing is counted where nobody turns tokens into units."""
        return ObserverOptions(says=lambda observer: observer.tokens(), oracle=lambda reported: {})


class Run:
    """A request of 13 tokens whose algorithm selects ``IDS``; sparse layers 0 and 3, a group."""

    def __init__(self, on="cpu", **options):
        (stage,), (observer,) = entry.topkv_register_stages(), entry.topkv_register_observers()
        settings = {"unit": UNIT, "budget": UNIT + SELECT, "buffer": UNIT * SELECT}
        settings |= {"ring_tokens": 8, "stages": ["regranulate"], "observers": ["regranulate"]}
        self.coordinator = make_coordinator(
            tier(on),
            registry=doubles(SCRIPTED_TOKENS, stage, observer),
            **{"algorithm": "scripted_tokens", **settings, **options},
        )
        self.slot = self.coordinator.request_begin()
        self.forward(13, prefill=[(self.slot, 13)])

    def forward(self, count, ids=IDS, **what):
        generator = torch.Generator().manual_seed(0)

        def rows(heads):
            return torch.randn(count, heads, DIM, generator=generator)

        for path in self.coordinator.layers:
            if path.algorithm:
                path.algorithm.algorithm.next_ids[path.view.layer] = ids
        self.coordinator.forward_begin(**what)
        for layer in range(LAYERS):
            self.coordinator.attention(layer, rows(HEADS), *(rows(KV_HEADS),) * 2)
        self.coordinator.forward_end()

    def counted(self):
        return self.coordinator.observers.counts["regranulate"]()


@pytest.mark.parametrize("on", ["cpu", "interpret"])
def test_tokens_of_each_step_are_added_by_layer(on):
    """Not those of the warm start before the first step, which attends to nothing."""
    run = Run(on)
    assert run.counted() == {0: 0, 3: 0}
    run.forward(1, decode=[run.slot])
    assert run.counted() == {0: EXTRA, 3: EXTRA}
    run.forward(1, decode=[run.slot])
    assert run.counted() == {0: 2 * EXTRA, 3: 2 * EXTRA}
    run.coordinator.close()


def test_layers_that_share_count_what_they_attend():
    run = Run(share="FS")
    run.forward(1, decode=[run.slot])
    assert run.counted() == {0: EXTRA, 3: EXTRA}
    run.coordinator.close()


def test_layers_without_the_stage_are_not_counted():
    run = Run(
        layers={"1-2": "resident", "3": {"unit": 1, "budget": 6, "buffer": 8, "stages": ["keep"]}}
    )
    run.forward(1, decode=[run.slot])
    assert run.counted() == {0: EXTRA}
    run.coordinator.close()
