"""The tiers that this machine has, for tests beside the conformance kit."""

from __future__ import annotations

import pytest

from topkv_testing.tiers import all_tiers


@pytest.fixture(
    params=[
        pytest.param(each, id=each.name, marks=[pytest.mark.gpu] * (each.name == "gpu"))
        for each in all_tiers()
    ]
)
def on(request):
    if request.param.missing:
        pytest.skip(f"tier {request.param.name!r}: {request.param.missing}")
    return request.param
