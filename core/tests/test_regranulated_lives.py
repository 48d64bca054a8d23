"""Whole lives of requests whose selections are regranulated, on every tier."""

from __future__ import annotations

import pytest

from topkv.testing.machines.regranulated import regranulated_machine, run_regranulated
from topkv.testing.machines.scenarios import SCENARIOS, run_scenario
from topkv.testing.tiers import all_tiers


@pytest.fixture(
    params=[
        pytest.param(each, id=each.name, marks=[pytest.mark.gpu] * (each.name == "gpu"))
        for each in all_tiers()
    ]
)
def on(request):
    """Each tier that this machine has."""
    if request.param.missing:
        pytest.skip(f"tier {request.param.name!r}: {request.param.missing}")
    return request.param


def test_lives(on):
    run_regranulated(on)


@pytest.mark.parametrize("unit", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, unit, on):
    fast = unit == 4
    tail = "selectable" if fast else "forced"
    run_scenario(scenario, on, make=regranulated_machine, unit=unit, fast=fast, tail=tail)
