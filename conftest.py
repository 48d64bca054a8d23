"""For all tests: hypothesis profiles, and Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import importlib.util
import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.selection import is_interpreted, is_later, is_nightly

# Triton reads the variable when it is imported, so this stands before any test module loads.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def quicken_the_interpreter() -> None:
    """Let Triton's interpreter look its language through once and not at each call.

    Whenever a kernel calls a function it lists all members of ``triton.language``, to replace
    those that are built in; the launch has replaced them already. That was a quarter of the time
    of interpreted kernels. Members are replaced all or none, so the first shows it. Another Triton
    than this was written for goes on as it does.
    """
    from triton.runtime import interpreter

    replaced = inspect.signature(getattr(interpreter, "_patch_builtin", lambda: None))
    if [*replaced.parameters] != ["pkg", "builder", "scope"]:
        return
    is_builtin, found = interpreter.tl.core.is_builtin, {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in found:
            found[pkg] = [name for name, each in inspect.getmembers(pkg) if is_builtin(each)]
        names = found[pkg]
        if names and is_builtin(getattr(pkg, names[0])):
            for name in names:
                interpreter._patch_attr(pkg, name, getattr(pkg, name), builder, scope)

    interpreter._patch_builtin = patch_builtin


def spare_the_interpreter_checks() -> None:
    """Leave out what the interpreter computes for assertions of overflow, which it then skips.

    Each 32-bit sum and product is computed once more in 64 bits and compared, a quarter of the
    time of kernels that index a lot; without ``TRITON_DEBUG`` nobody looks at the result.
    """
    from triton.runtime import interpreter

    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if getattr(options, "debug", True) is False and hasattr(options, "sanitize_overflow"):
        object.__setattr__(options, "sanitize_overflow", False)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    quicken_the_interpreter()
    spare_the_interpreter_checks()

# `derandomize` and `max_examples` are stated everywhere: where one is left out, Hypothesis takes
# it from the profile that is loaded, which is another one where the environment says `CI`.
_SLOW = [HealthCheck.too_slow]
settings.register_profile(
    "default", deadline=None, suppress_health_check=_SLOW, derandomize=False, max_examples=100
)
# A commit draws 32 examples of each property, a mutant 100, a night 1000.
settings.register_profile(
    "ci", deadline=None, suppress_health_check=_SLOW, derandomize=True, database=None,
    max_examples=32,
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
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
