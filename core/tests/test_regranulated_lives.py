"""Whole lives of requests whose selections are regranulated, on every tier."""

from __future__ import annotations

import pytest

from topkv_testing.machines.regranulated import regranulated_machine, run_regranulated
from topkv_testing.machines.scenarios import SCENARIOS, run_scenario

pytestmark = pytest.mark.nightly


def test_lives(on):
    run_regranulated(on)


@pytest.mark.parametrize("unit", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, unit, on):
    fast = unit == 4
    tail = "selectable" if fast else "forced"
    run_scenario(scenario, on, make=regranulated_machine, unit=unit, fast=fast, tail=tail)
