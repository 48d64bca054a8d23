"""Fixtures that a ``conftest.py`` imports."""

from __future__ import annotations

from typing import Any

import pytest

from topkv_testing.tiers import Tier, all_tiers

TIERS = [
    pytest.param(each, id=each.name, marks=[pytest.mark.gpu] * (each.name == "gpu"))
    for each in all_tiers()
]
"""Parameters of a test that runs on every tier."""


@pytest.fixture(params=TIERS)
def on(request: Any) -> Tier:
    """Each tier that this machine has."""
    if request.param.missing:
        pytest.skip(f"tier {request.param.name!r}: {request.param.missing}")
    found: Tier = request.param
    return found
