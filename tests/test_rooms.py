"""The core in rooms: each imports from rooms below it alone, and there are few of them.

A room is a module or a package directly in ``core/src/topkv``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.packages import ROOT

CORE = ROOT / "core/src/topkv"

ROOMS = (
    *("version", "errors", "messages", "types", "entries"),
    *("checks", "parameters", "plugins", "hooks"),
    *("ops", "kv", "transfer", "config", "memory"),
    *("decode", "requests", "report", "prompts", "observers"),
    *("assembly", "between", "coordinator", "_attach", "__init__"),
)
"""From the ground up. ``hooks`` names for type checkers what the core hands to plugins, which is
made above it; so does ``__init__`` the public names, which it loads on first use."""

MOST_ROOMS = 24

MOST_LINES = 11000
"""Most physical lines of ``core/src/topkv``: 10,700, and 300 for several queries a row."""


def room_of(path: Path, core: Path) -> str:
    return path.relative_to(core).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, skip_types: bool) -> Iterator[str]:
    """Rooms that a module imports from, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if skip_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "topkv":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("topkv."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("topkv.")
            )
        yield from imports_of(node, skip_types)


def upward(core: Path, rooms: tuple[str, ...]) -> list[str]:
    """``module -> room`` of each import from a room above."""
    found = []
    for path in sorted(core.rglob("*.py")):
        own = room_of(path, core)
        tree = ast.parse(path.read_text("utf-8"))
        for name in imports_of(tree, skip_types=own in ("hooks", "__init__")):
            if name in rooms and rooms.index(name) > rooms.index(own):
                found.append(f"{path.relative_to(core)} -> {name}")
    return found


def test_the_rooms_are_few_and_all_are_listed():
    there = {room_of(path, CORE) for path in CORE.rglob("*.py")}
    assert there == set(ROOMS)
    assert len(ROOMS) <= MOST_ROOMS


def test_imports_go_down():
    assert not upward(CORE, ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "from topkv.high import x",
        "from topkv import high",
        "import topkv.high",
        "def f():\n    from topkv.high.deep import x",
    ],
)
def test_an_import_from_above_is_seen(tmp_path, source):
    (tmp_path / "low.py").write_text(source)
    (tmp_path / "high.py").write_text("from topkv.low import x")
    assert upward(tmp_path, ("low", "high")) == ["low.py -> high"]


def test_the_core_stays_short():
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in CORE.rglob("*.py"))
    assert lines <= MOST_LINES, f"{lines} lines of at most {MOST_LINES}"
