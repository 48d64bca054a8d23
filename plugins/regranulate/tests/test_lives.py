"""Whole lives of requests whose selections are regranulated, on every tier."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings

from tests.machines.lifecycle import machine_of, run_lives
from tests.machines.regrained import RegrainedMachine
from tests.machines.scenarios import SCENARIOS, run_scenario
from topkv_regranulate.entry import topkv_register_stages
from topkv_testing.machines.lifecycle_model import SPARSE
from topkv_testing.tiers import tier

(ENTRY,) = topkv_register_stages()


def extra_of(unit, tokens, length):
    """Tokens that a lane attends in closed units without having selected them."""
    end = max(0, length - 1) // unit * unit
    chosen = {token for token in tokens if 0 <= token < end}
    return len({unit * (token // unit) + i for token in chosen for i in range(unit)} - chosen)


class Regranulated(RegrainedMachine):
    """Lives with this stage, whose extra tokens are counted beside."""

    stage = ENTRY.name
    further = (ENTRY,)

    def _compare(self, todo, outs, given, ids):
        super()._compare(todo, outs, given, ids)
        for layer in SPARSE:
            unit, path = self.groups[layer].unit, self.coordinator.layers[layer]
            if layer >= len(outs) or unit == 1 or not todo.rows:
                continue
            lanes = []
            for row, slot in enumerate(todo.rows):
                length = self.live[slot].length + (row in todo.appending) if slot >= 0 else 0
                lanes += [extra_of(unit, lane, length) for lane in ids[layer][row].tolist()]
            extra = path.algorithm.links[-1].stage.extra[path.view.index, : len(lanes)]
            assert extra.tolist() == lanes, f"extra tokens of layer {layer}"


def test_a_few_lives():
    few = settings(max_examples=10, stateful_step_count=15, deadline=None, derandomize=True)
    run_lives(Regranulated, tier("cpu"), further=few)


@pytest.mark.nightly
def test_lives(on):
    run_lives(Regranulated, on)


@pytest.mark.nightly
@pytest.mark.parametrize("unit", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, unit, on):
    fast = unit == 4
    tail = "selectable" if fast else "forced"
    make = partial(machine_of, Regranulated)
    run_scenario(scenario, on, make=make, unit=unit, fast=fast, tail=tail)
