"""For all tests: hypothesis profiles, and Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.selection import is_interpreted, is_later, is_nightly, left_out

# Triton reads the variable when it is imported, so this stands before any test module loads.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from topkv_testing.interpreter import quicken

    quicken()

# `derandomize` and `max_examples` are stated everywhere: where one is left out, Hypothesis takes
# it from the profile that is loaded, which is another one where the environment says `CI`.
_SLOW = [HealthCheck.too_slow]
settings.register_profile(
    "default", deadline=None, suppress_health_check=_SLOW, derandomize=False, max_examples=100
)
# A commit draws 16 examples of each property, a mutant 100, a night 1000.
settings.register_profile(
    "ci", deadline=None, suppress_health_check=_SLOW, derandomize=True, database=None,
    max_examples=16,
)  # fmt: skip
# Of `make isolation`, which is about what is installed and not about arithmetic.
settings.register_profile("one", settings.get_profile("ci"), max_examples=1)
settings.register_profile(
    "nightly", settings.get_profile("default"), max_examples=1000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what has another mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_interpreted(item) and is_later(item):
            item.add_marker("slow")
        if is_interpreted(item) and is_nightly(item):
            item.add_marker("nightly")
    for item in left_out(items):
        item.add_marker("nightly")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
