"""Whole lives of requests with latent rows and an indexer, on every tier."""

from __future__ import annotations

import pytest

from tests.machines.latent import latent_machine, run_latent
from tests.machines.scenarios import SCENARIOS, run_scenario

pytestmark = pytest.mark.nightly


def test_lives(on):
    run_latent(on)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("kv_format", ["model", "fp8"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario, kv_format, unit, on):
    if on.name == "interpret" and kv_format == "fp8":
        pytest.skip("wide rows are slow there, and the kernels see them in test_latent")
    fast = kv_format == "model"
    start = {"kv_format": kv_format, "fast": fast, "unit": unit}
    run_scenario(scenario, on, make=latent_machine, **start)
