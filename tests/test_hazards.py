"""docs/hazards.md names tests that exist, for every hazard."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/hazards.md").read_text()


def known_tests():
    """Names of tests by file name; the kit's modules hold methods of suites."""
    found = {}
    for folder in ("core", "plugins", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if ".venv" not in path.parts and ("tests" in path.parts or "testing" in path.parts):
                names = {
                    node.name
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
                }
                found.setdefault(path.name, set()).update(names)
    return found


def test_named_tests_exist():
    found = known_tests()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 50
    lacking = [f"{file}::{test}" for file, test in named if test not in found.get(file, ())]
    assert not lacking


def test_every_hazard_has_a_row():
    rows = re.findall(r"^\| (\d[\d, -]*) \|", PAGE, re.MULTILINE)
    numbers = set()
    for row in rows:
        for part in row.split(","):
            first, _, last = part.strip().partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    assert numbers == set(range(1, 56))
