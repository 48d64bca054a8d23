"""docs/hazards.md and docs/kernels.md name tests that exist: every hazard, every kernel."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs_blocks import PAGES, ROOT, table_under

PAGE = PAGES["hazards.md"].read_text("utf-8")
KERNELS = PAGES["kernels.md"].read_text("utf-8")
CORE = ROOT / "core" / "src" / "topkv"
AUTHORING = ROOT / "tools" / "authoring" / "src" / "topkv_authoring"


def known_tests():
    """Names of tests by file name, with and without its folder; the kit has methods of suites."""
    found = {}
    for folder in (
        "core",
        "plugins",
        "tests",
        "tools/testing",
        "tools/prefixes",
        "tools/authoring",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            if ".venv" not in path.parts and {"tests", "topkv_testing"} & {*path.parts}:
                names = {
                    node.name
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
                }
                for name in (path.name, f"{path.parent.name}/{path.name}"):
                    found.setdefault(name, set()).update(names)
    return found


NAMED = r"`([\w/]+\.py)::(test_\w+)`"


@pytest.mark.parametrize(
    ("page", "least"), [(PAGE, 50), (KERNELS, 20)], ids=["hazards", "kernels"]
)
def test_named_tests_exist(page, least):
    found = known_tests()
    named = re.findall(NAMED, page)
    assert len(named) > least
    lacking = [f"{file}::{test}" for file, test in named if test not in found.get(file, ())]
    assert not lacking


def test_every_hazard_has_a_row():
    rows = re.findall(r"^\| (\d[\d, -]*) \|", PAGE, re.MULTILINE)
    numbers = set()
    for row in rows:
        for part in row.split(","):
            first, _, last = part.strip().partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(range(1, 57))


JIT = ("triton.jit", "jit")


def kernels_in(folder):
    """Names of kernels, and of functions of kernels, by file: of Triton, and files of CUDA."""
    found = {str(path.relative_to(folder)): set() for path in folder.rglob("*.cu")}
    for path in folder.rglob("*.py"):
        names = {
            node.name
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(mark).startswith(JIT) for mark in node.decorator_list)
        }
        if names:
            found[str(path.relative_to(folder))] = names
    return found


def defined_in(path):
    """Functions, classes and their methods of a source, as ``name`` and ``Class.name``."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            yield from (f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name"))


def assert_references(cell, folder):
    """Assert that each ``file::name`` of a cell is defined there."""
    for file, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", cell):
        assert name in set(defined_in(folder / file)), f"{file} has no {name}"


@pytest.mark.parametrize(("heading", "sources"), [("Core", CORE), ("topkv-authoring", AUTHORING)])
def test_every_kernel_of_a_library_has_a_row(heading, sources):
    _, *rows = table_under(KERNELS, heading)
    reported = {}
    for file, kernels, _, reference, compared in rows:
        reported.setdefault(file.strip("`"), set()).update(re.findall(r"`(\w+)`", kernels))
        assert_references(reference, sources)
        assert re.search(NAMED, compared), f"{kernels}: no test"
    found = kernels_in(sources)
    launched = {
        file: {name for name in names if name.endswith("_kernel")} for file, names in found.items()
    }
    assert reported.keys() == found.keys()
    for file, names in reported.items():
        assert launched[file] <= names <= found[file], file


def test_every_kernel_of_the_plugins_has_a_row():
    _, *rows = table_under(KERNELS, "Plugins")
    reported = {}
    for plugin, files, reference, compared in rows:
        name = re.match(r"\[(\w+)\]", plugin)[1]
        (package,) = (ROOT / "plugins" / name / "src").iterdir()
        reported[name] = set(re.findall(r"`([\w.]+)`", files))
        assert_references(reference, package)
        tests = ROOT / "plugins" / name / "tests"
        for file, test in re.findall(NAMED, compared):
            assert test in set(defined_in(tests / file)), f"{name}: {file} has no {test}"
    found = {
        source.parents[1].name: set(kernels_in(source))
        for source in ROOT.glob("plugins/*/src/*")
        if kernels_in(source)
    }
    assert reported == found


def test_what_is_measured_is_there():
    _, *rows = table_under(KERNELS, "Measurements")
    for _, scripts, results in rows:
        for script in re.findall(r"`([\w/]+\.py)`", scripts):
            assert (ROOT / script).is_file(), script
        for result in re.findall(r"`([\w.]+)`", results):
            assert (ROOT / "benchmarks" / "results" / result).is_file(), result
