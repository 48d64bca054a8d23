"""Fixtures for all tests of the core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from topkv_testing.fixtures import on as on
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier

sys.path.append(str(Path(__file__).parent))  # config_cases stands beside the tests


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
