"""Pages about what plugins import: types and entries, functions of the core, suites of the kit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docstrings import (
    CORE,
    KIT,
    ROOT,
    SOURCES,
    class_of,
    function,
    is_public,
    one_line,
    plain,
    table,
    tree_of,
)

LIBRARY = (
    "topkv_authoring",
    "topkv.ops",
    "topkv.plugins.contract",
    "topkv.errors",
    "topkv.report",
    "topkv.decode.loads",
    "topkv.kv.layout",
    "topkv.kv.store",
    "topkv.transfer.geometry",
    "topkv.transfer.reference",
    "topkv.transfer.triton",
    "topkv_dropping",
    "topkv_engines",
    "topkv_prefixes.entry",
    "topkv_prefixes.objects",
)
"""Modules that are public for authors, see ``docs/stability.md``; of a folder all that launch."""

SUITES = {
    "algorithms": "AlgorithmOptions",
    "backends": "BackendOptions",
    "transfers": None,
    "evictions": None,
    "topks": "TopKOptions",
    "observers": "ObserverOptions",
    "stages": "StageOptions",
    "stage.options": None,
    "storages": "StorageOptions",
    "engines": "EngineCase",
}
"""Modules of ``topkv_testing`` with a suite, and what the fixture ``options`` of each gives."""


# Types and entries.


def types() -> str:
    """Every class of ``topkv.types`` and ``topkv.entries``, and the constants of the latter."""
    parts = [
        "# Types",
        "What hooks are given and what entries say, made from `topkv.types` and `topkv.entries`. "
        "A name without a text behind it is what its formula says. "
        "[The conformance kit](kit.md#tiers) has what each tier needs.",
    ]
    for name in ("types", "entries"):
        tree = tree_of(CORE / f"{name}.py")
        parts += [f"## `topkv.{name}`", plain(ast.get_docstring(tree) or "")]
        for place, node in enumerate(tree.body):
            if isinstance(node, ast.ClassDef):
                parts += class_of(node)
            elif isinstance(node, ast.Assign):
                parts += _constant(node, tree.body[place + 1])
    return "\n\n".join([*parts, ""])


def _constant(node: ast.Assign, below: ast.stmt) -> Iterator[str]:
    """A constant and the docstring below it; the traits with the tests that ask for each."""
    name = ast.unparse(node.targets[0])
    yield f"### `{name}`"
    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
        yield plain(str(below.value.value))
    if not isinstance(node.value, ast.Dict):
        yield f"```python\n{ast.unparse(node)}\n```"
        return
    asked = _tests_by_trait()
    rows = []
    for key, meaning in ast.literal_eval(node.value).items():
        tests = ", ".join(f"`{test}`" for test in asked.pop(key, []))
        rows.append((f"`{key}`", meaning, tests))
    if asked:
        raise ValueError(f"the kit asks for traits that {name} lacks: {', '.join(asked)}")
    yield table(("trait", "promise", "asked for by"), rows)


def _tests_by_trait() -> dict[str, list[str]]:
    """Functions of the kit that run, or look closer, where an entry states a trait."""
    found: dict[str, list[str]] = {}
    for path in sorted(KIT.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                for trait in _traits_of(node):
                    found.setdefault(trait, []).append(node.name)
    return found


def _traits_of(node: ast.FunctionDef) -> list[str]:
    """Traits that a function requires, or looks up in ``capabilities.traits``."""
    found = []
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Attribute(attr="require"), args=[ast.Constant(value=trait)]):
                found.append(str(trait))
            case ast.Call(func=ast.Name(id="drawn"), keywords=given):
                stated = [each.value for each in given if each.arg == "traits"]
                found += [str(trait) for each in stated for trait in ast.literal_eval(each)]
            case ast.Compare(
                left=ast.Constant(value=trait), comparators=[ast.Attribute(attr="traits")]
            ):
                found.append(str(trait))
    return found


# Functions.


def functions() -> str:
    """Every public function and class of the modules that plugins may call."""
    parts = [
        "# Library",
        "What a plugin may call beside what its hooks are given, module by module. "
        "[Stability](../stability.md) says what of it is public. Each operation takes "
        '`impl`: `"reference"` is torch, `"triton"` the kernel of the same formula '
        "([Kernels and the kit](../kernels.md)). Exact top-k is called with the scratch that "
        "`topk` of [`AlgorithmSetup`](hooks.md#algorithmsetup) makes once.",
    ]
    for module, path in _modules():
        tree = tree_of(path)
        parts += [f"## `{module}`", plain(ast.get_docstring(tree) or "")]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and is_public(node):
                parts += class_of(node)
            elif isinstance(node, ast.FunctionDef) and is_public(node):
                parts += function(node, f"### `{node.name}`")
    return "\n\n".join([*parts, ""])


def _modules() -> Iterator[tuple[str, Path]]:
    """Names and files of ``LIBRARY``; kernels and references stand behind the functions of their
    folder."""
    for name in LIBRARY:
        package, *inside = name.split(".")
        place = SOURCES[package].joinpath(*inside)
        if not place.is_dir():
            yield name, place.with_suffix(".py")
            continue
        for path in sorted(place.glob("*.py")):
            if not path.stem.endswith(("_kernels", "_reference", "__init__")):
                yield f"{name}.{path.stem}", path


# The kit.


def kit() -> str:
    """How the kit is run, and for each suite its options and its tests."""
    text = (ROOT / "docs" / "reference" / "_kit.md").read_text("utf-8")
    classes = _classes()
    parts = [text.strip("\n")]
    for module, options in SUITES.items():
        path = KIT / f"{module.replace('.', '/')}.py"
        tree = tree_of(path)
        (suite,) = (
            each for each in tree.body if isinstance(each, ast.ClassDef) and "Tests" in each.name
        )
        parts += [f"## `{suite.name}`", plain(ast.get_docstring(tree) or "")]
        while options:
            parts += class_of(classes[options])
            # A class of options has those of its base too.
            bases = [ast.unparse(base) for base in classes[options].bases]
            options = next((base for base in bases if base in classes), None)
        rows = [_test(each) for each in _tests(suite, classes)]
        parts.append(table(("test", "what it looks at", "trait"), rows))
    return "\n\n".join([*parts, ""])


def _classes() -> dict[str, ast.ClassDef]:
    """Every class of the kit, by name."""
    return {
        node.name: node
        for path in sorted(KIT.rglob("*.py"))
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    }


def _tests(suite: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.FunctionDef]:
    """Tests of a suite: its own, then those of its bases, the last base first as pytest does."""
    found = []
    for base in reversed(suite.bases):
        if ast.unparse(base) in classes:
            found += _tests(classes[ast.unparse(base)], classes)
    own = (each for each in suite.body if isinstance(each, ast.FunctionDef))
    return found + [each for each in own if each.name.startswith("test_")]


def _test(node: ast.FunctionDef) -> tuple[str, ...]:
    traits = ", ".join(f"`{trait}`" for trait in dict.fromkeys(_traits_of(node)))
    return f"`{node.name}`", one_line(ast.get_docstring(node) or ""), traits
