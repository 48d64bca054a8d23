"""No request waits for a compiler because its prompt has another length than those before it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.packages import ROOT
from tests.test_lengths import sources_in

VARY = {
    *("start", "first_unit", "first_lane_row", "low", "claim_below"),  # where a chunk begins
    *("tokens", "rows", "keys", "count", "batch"),  # how much of it there is
}
"""Names of arguments that kernels get as numbers and that change from request to request. Triton
would compile a kernel for each kind of them: 1, multiples of 16, and all others."""


def kernels_in(path: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """Name, arguments that are no constants, and what stands in the decorator of each."""
    for each in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(each, ast.FunctionDef) or not each.decorator_list:
            continue
        reported = ast.unparse(each.decorator_list[0])
        if reported.startswith("triton.jit"):
            arguments = {
                one.arg
                for one in each.args.args
                if one.annotation is None or "constexpr" not in ast.unparse(one.annotation)
            }
            yield each.name, arguments, {*re.findall(r"'(\w+)'", reported)}


SOURCES = [
    path
    for path in sources_in(ROOT)
    if "src" in path.parts and "triton.jit" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_changes_from_request_to_request_is_not_specialized(path):
    for name, arguments, reported in kernels_in(path):
        if name.endswith("_kernel"):  # others are parts of these
            assert arguments & VARY <= reported, name


def test_kernels_are_found():
    found = {name: arguments for path in SOURCES for name, arguments, _ in kernels_in(path)}
    assert {"start", "tokens"} <= found["store_kernel"]
    assert "WRITE" not in found["store_kernel"]
    assert len(found) > 100
