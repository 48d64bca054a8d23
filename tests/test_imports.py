"""Imports have no circles: no module needs another one that needs the first.

Counted are imports that run when a module is loaded, and those for type checkers. Imports inside
functions are not: they run later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.packaging.packages import ROOT

SOURCES = [path for pattern in ("*/src", "*/*/src") for path in ROOT.glob(pattern)]


def modules_of(sources: Sequence[Path]) -> dict[str, Path]:
    """The files of source folders, by the names of their modules."""
    found = {}
    for source in sources:
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(node: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports outside of functions; those for type checkers if ``types``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif types or not _is_for_types(child):
            yield from imports_in(child, types)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def names_in(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, ...]]:
    """For each name that is imported, the modules that it may be or come from, likeliest first."""
    if isinstance(node, ast.Import):
        yield from ((alias.name,) for alias in node.names)
        return
    base = resolve_name("." * node.level + (node.module or ""), package)
    yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def graph_of(sources: Sequence[Path]) -> dict[str, set[str]]:
    """Modules that each module imports, among those of the sources."""
    modules = modules_of(sources)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        is_package = path.name == "__init__.py"
        package = module if is_package else module.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), path)
        # A package imports for type checkers alone the modules that it loads on first use.
        graph[module] = {
            next((name for name in names if name in modules), module)
            for node in imports_in(tree, types=not is_package)
            for names in names_in(node, package)
        } - {module}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """One circle, each module before one that it imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_imports_form_a_tree():
    graph = graph_of(SOURCES)
    assert {"topkv.coordinator", "topkv_quest.entry"} <= graph.keys()
    circle = circle_in(graph)
    assert not circle, f"modules import each other in a circle: {' -> '.join(circle)}"


@pytest.mark.parametrize(
    ("line", "circle"),
    [
        ("from package.first import NAME", True),
        ("from package import first", True),
        ("import package.first", True),
        ("from . import first", True),
        ("from .first import NAME", True),
        ("if TYPE_CHECKING:\n    from package.first import NAME", True),
        ("try:\n    import torch\nexcept ImportError:\n    from package import first", True),
        ("class A:\n    from package import first", True),
        ("from package import NAME", False),
        ("def later():\n    from package.first import NAME", False),
        ("class A:\n    def later(self):\n        from package import first", False),
    ],
)
def test_circles_are_found(tmp_path, line, circle):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("if TYPE_CHECKING:\n    from package.first import NAME\n")
    (folder / "first.py").write_text("import package.second\n")
    (folder / "second.py").write_text(line)
    found = circle_in(graph_of([tmp_path]))
    assert set(found) == ({"package.first", "package.second"} if circle else set())
