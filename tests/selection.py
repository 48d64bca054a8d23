"""Tests that ``make test`` leaves to ``make test-slow``, and a commit to a night."""

from __future__ import annotations

import pytest

SOONER = ("plugins/quest/", "plugins/triton_attention/")
"""Plugins whose conformance suites ``make test`` interprets: one of either kind. All other
interpreted tests of plugins and examples are left to ``make test-slow``."""

LATER = ("test_stored_sessions", "test_engine_pages", "test_sticky")
"""Tests of the core whose interpreted cells are left to ``make test-slow`` too."""

KERNELS = (
    "kernels", "long_", "hot_hooks", "reads_nothing", "decode_builds", "slots_and_host_pages",
    "ids_are_well_formed", "rows_do_not_see", "length_edges", "what_is_left", "of_equal",
    "worth", "share_p", "attends", "float64", "oracle", "reused_slot",
)  # fmt: skip
"""Parts of the names of the tests by which interpreted kernels of a plugin are compared with its
reference or a formula, of whole suites: planted errors of kernels show in these. The rest of a
suite finds the same on a reference; a night and a GPU run it on kernels."""


def is_interpreted(item: pytest.Item) -> bool:
    """Return True if Triton interprets what a test calls."""
    cell = item.nodeid.rpartition("[")[2]
    return "triton-cpu" in cell or "interpret" in cell


def is_later(item: pytest.Item) -> bool:
    """Return True if ``make test`` leaves an interpreted test to the slow ones."""
    if item.nodeid.startswith("core/"):
        return any(name in item.nodeid for name in LATER)
    sooner = item.nodeid.startswith(SOONER) and "test_conformance" in item.nodeid
    return item.nodeid.startswith(("plugins/", "examples/")) and not sooner


def is_nightly(item: pytest.Item) -> bool:
    """Return True if a test is of a suite, and other tests of the suite compare kernels."""
    name = item.nodeid.rpartition("::")[2].partition("[")[0]
    return "test_conformance" in item.nodeid and not any(part in name for part in KERNELS)
