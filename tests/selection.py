"""Tests that ``make test`` leaves to ``make test-slow``, and a commit to a night."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from zlib import crc32

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


NIGHT = (
    "core/tests/test_coordinator.py::test_drafts[interpret-8-exact",
    "plugins/fp8_host_format/tests/test_rows.py::test_the_kernel_rounds_to_the_same_bits",
    "plugins/skip_softmax/tests/test_decode.py::test_a_factor_that_leaves_nothing_out",
    "plugins/top_p/tests/test_conformance.py::TestTopP::test_length_edges",
    "plugins/top_p/tests/test_conformance.py::TestTopP::test_of_equal",
    "plugins/top_p/tests/test_selection.py::test_a_decode_attends",
    "plugins/top_p/tests/test_selection.py::test_a_larger_p",
    "plugins/top_p/tests/test_selection.py::test_a_neutral_stage",
    "plugins/trained_gate/tests/test_decode.py",
    "plugins/transformers/tests/latent/test_plugins.py",
    "tests/test_mutants.py::test_a_mutant_is_caught_and_its_twin_passes[the kernel uses the first",
)
"""Interpreted tests of many seconds each, whose kernels other tests of a commit compare too."""


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
    """Return True if other tests of a commit compare the kernels of a test."""
    if item.nodeid.startswith(NIGHT):
        return True
    name = item.nodeid.rpartition("::")[2].partition("[")[0]
    return "test_conformance" in item.nodeid and not any(part in name for part in KERNELS)


def left_out(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that a commit leaves to a night: of a test that is marked ``sampled(N)`` it
    runs one of N, at least one, always the same ones. A case that is asked for alone runs."""
    cases = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not any(map(item.get_closest_marker, ("nightly", "gpu", "skip"))):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, each), found in cases.items():
        found.sort(key=lambda item: crc32(item.nodeid.encode()))
        yield from found[-(-len(found) // each) :]
