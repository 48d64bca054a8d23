"""Fixtures for all tests of the core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import all_tiers, tier

sys.path.append(str(Path(__file__).parent))  # config_cases stands beside the tests


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


@pytest.fixture
def make():
    """Coordinators on a CPU with two sparse layers around a resident and a streamed one."""
    made = []

    def make(**options):
        made.append(make_coordinator(tier("cpu"), **options))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close()
