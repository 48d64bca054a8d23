"""For all tests: hypothesis profiles, and Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import importlib.util
import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton reads the variable when it is imported, so this stands before any test module loads.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def quicken_the_interpreter() -> None:
    """Let Triton's interpreter look its language through once and not at each call.

    Whenever a kernel calls a function it lists all members of ``triton.language``, to replace
    those that are built in; the launch has replaced them already. That was a quarter of the time
    of interpreted kernels. Members are replaced all or none, so the first tells. Another Triton
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

# `derandomize` is stated everywhere: where it is left out, Hypothesis takes it from the profile
# that it loads by itself, which is another one where the environment says `CI`.
_SLOW = [HealthCheck.too_slow]
settings.register_profile("default", deadline=None, suppress_health_check=_SLOW, derandomize=False)
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


SOONER = ("plugins/quest/", "plugins/triton_attention/")
"""Plugins whose conformance suites ``make test`` interprets: one of either kind. What else of
plugins and examples Triton interprets is left to ``make test-slow``."""

LATER = ("test_stored_sessions", "test_engine_pages", "test_host_format", "test_sticky")
"""Tests of the core whose interpreted cells are left to it too."""

KERNELS = (
    "kernels", "long_", "hot_hooks", "reads_nothing", "decode_builds", "slots_and_host_pages",
    "ids_are_well_formed", "rows_do_not_see", "length_edges", "what_is_left", "of_equal",
    "worth", "share_p", "attends", "float64", "oracle", "reused_slot",
)  # fmt: skip
"""Parts of the names of the tests by which interpreted kernels of a plugin are compared with its
reference or a formula, of whole suites: planted errors of kernels show in these. The rest of a
suite says what a reference says too; a night and a GPU run it on kernels."""


def is_interpreted(item: pytest.Item) -> bool:
    """True if Triton interprets what a test calls."""
    cell = item.nodeid.rpartition("[")[2]
    return "triton-cpu" in cell or "interpret" in cell


def is_later(item: pytest.Item) -> bool:
    """True if a test is interpreted and ``make test`` leaves it to the slow ones."""
    if item.nodeid.startswith("core/"):
        return any(name in item.nodeid for name in LATER)
    sooner = item.nodeid.startswith(SOONER) and "test_conformance" in item.nodeid
    return item.nodeid.startswith(("plugins/", "examples/")) and not sooner


def is_nightly(item: pytest.Item) -> bool:
    """True if it is of a suite whose other tests show what kernels do."""
    name = item.nodeid.rpartition("::")[2].partition("[")[0]
    return "test_conformance" in item.nodeid and not any(part in name for part in KERNELS)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what has another mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_interpreted(item) and is_later(item):
            item.add_marker("slow")
            if is_nightly(item):
                item.add_marker("nightly")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
