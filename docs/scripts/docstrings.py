"""Docstrings and definitions of parsed sources as Markdown.

Sources are parsed, never imported: the build of the site needs neither torch nor topkv.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "topkv"
KIT = ROOT / "tools" / "testing" / "src" / "topkv_testing"
SOURCES = {
    "topkv": CORE,
    "topkv_authoring": ROOT / "tools" / "authoring" / "src" / "topkv_authoring",
    "topkv_dropping": ROOT / "tools" / "dropping" / "src" / "topkv_dropping",
    "topkv_engines": ROOT / "tools" / "engines" / "src" / "topkv_engines",
    "topkv_prefixes": ROOT / "tools" / "prefixes" / "src" / "topkv_prefixes",
}


def plain(text: str) -> str:
    """reStructuredText of a docstring as Markdown: literals, and blocks behind ``::``."""
    lines: list[str] = []
    block = False
    for line in text.splitlines():
        if block and line.strip() and not line.startswith("    "):
            _end_block(lines)
            block = False
        if block:
            lines.append(line.removeprefix("    "))
        elif line.rstrip().endswith("::"):
            head = line.strip().removesuffix("::").replace("``", "`")
            lines += [f"{head}:" if head else "", "", "```python"]
            block = True
        else:
            lines.append(line.replace("``", "`"))
    if block:
        _end_block(lines)
    return "\n".join(lines).replace("```python\n\n", "```python\n")


def _end_block(lines: list[str]) -> None:
    while not lines[-1]:
        lines.pop()
    lines += ["```", ""]


def sections(doc: str) -> dict[str, str]:
    """A docstring by section: "" for its text, then Args, Returns, Raises, Attributes."""
    found, name = {"": ""}, ""
    for line in doc.splitlines():
        head = re.fullmatch(r"(Args|Returns|Raises|Attributes)(?: \((.+)\))?:", line)
        if head:
            name = head[1]
            found[name] = ""
            found[""] += f"{name}: {head[2]}.\n" if head[2] else ""
        elif name and line and not line.startswith(" "):
            name = ""  # text that goes on behind a section
            found[""] += f"\n{line}\n"
        else:
            found[name] += f"{line}\n"
    return {key: text.strip("\n") for key, text in found.items()}


def items(section: str) -> Iterator[tuple[str, str]]:
    """The ``name: text`` items of a section; further lines of an item are indented."""
    for item in re.split(r"\n(?=    \S)", section):
        name, _, text = item.strip().partition(": ")
        yield name, " ".join(text.split()).replace("``", "`")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars are escaped where they stand in no literal."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[_in_cell(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _in_cell(text: str) -> str:
    parts = text.split("`")
    return "`".join(part if n % 2 else part.replace("|", "\\|") for n, part in enumerate(parts))


def one_line(text: str) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


# Definitions.


def tree_of(path: Path) -> ast.Module:
    """A source, parsed."""
    return ast.parse(path.read_text("utf-8"))


def marks(node: ast.AST) -> list[str]:
    """Decorators of a definition, as they are written."""
    return [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]


def is_public(node: ast.AST) -> bool:
    """A function or class with a docstring whose name has no leading underscore."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return isinstance(node, kinds) and node.name[0] != "_" and bool(ast.get_docstring(node))


def signature(node: ast.FunctionDef, width: int = 90) -> str:
    """The head of a function without ``self``, one argument a line where it is wider."""
    listed = list(_parameters(node.args))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({', '.join(listed)}){returns}"
    if len(line) <= width:
        return line
    lines = "\n".join(f"    {each}," for each in listed)
    return f"def {node.name}(\n{lines}\n){returns}"


def _parameters(given: ast.arguments) -> Iterator[str]:
    first = len(given.args) - len(given.defaults)
    for number, argument in enumerate(given.args):
        default = given.defaults[number - first] if number >= first else None
        if argument.arg not in ("self", "cls"):
            yield _parameter(argument, default)
    if given.vararg or given.kwonlyargs:
        yield f"*{ast.unparse(given.vararg) if given.vararg else ''}"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def function(node: ast.FunctionDef, head: str) -> Iterator[str]:
    """A function: its head, what it says, and tables of arguments and errors."""
    found = sections(ast.get_docstring(node) or "")
    yield head
    yield f"```python\n{signature(node)}\n```"
    yield plain(found.pop(""))
    for name, text in found.items():
        if name == "Returns":
            yield f"**Returns** {' '.join(text.split()).replace('``', '`')}"
        else:
            yield _listed("argument" if name == "Args" else "error", text)


def _listed(column: str, text: str) -> str:
    rows = [(f"`{item}`".replace(", ", "`, `"), reported) for item, reported in items(text)]
    return table((column, "meaning"), rows)


def class_of(node: ast.ClassDef) -> Iterator[str]:
    """A class: what it says, its attributes, and what it works out of them or does."""
    found = sections(ast.get_docstring(node) or "")
    yield f"### `{node.name}`"
    yield plain(found.pop(""))
    if "Args" in found:
        yield _listed("argument", found["Args"])
    if "Attributes" in found:
        yield _attributes(node, found["Attributes"])
    if "Raises" in found:
        yield _listed("error", found["Raises"])
    members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    members = [each for each in members if "property" in marks(each) or is_public(each)]
    reported = [each for each in members if len(sections(ast.get_docstring(each) or "")) > 1]
    rows = [_member(each) for each in members if each not in reported]
    if rows:
        yield table(("property or method", "meaning"), rows)
    for each in reported:
        yield from function(each, f"#### `{node.name}.{each.name}`")


def _attributes(node: ast.ClassDef, section: str) -> str:
    """The table of attributes, with types and defaults where the class declares them."""
    fields = {
        ast.unparse(each.target): each for each in node.body if isinstance(each, ast.AnnAssign)
    }
    rows = []
    for names, reported in items(section):
        kinds = {_declared(fields[name]) for name in names.split(", ") if name in fields}
        kind = kinds.pop() if len(kinds) == 1 else ""
        rows.append((f"`{names}`".replace(", ", "`, `"), kind, reported))
    if not any(kind for _, kind, _ in rows):
        return table(("attribute", "meaning"), [(name, reported) for name, _, reported in rows])
    return table(("attribute", "type", "meaning"), rows)


def _declared(field: ast.AnnAssign) -> str:
    """Type of an attribute, and its default unless a factory makes that."""
    default = field.value
    if isinstance(default, ast.Call):
        given = {each.arg: each.value for each in default.keywords}
        default = given.get("default")
    shown = "" if default is None else f" = {ast.unparse(default)}"
    return f"`{ast.unparse(field.annotation)}{shown}`"


def _member(node: ast.FunctionDef) -> tuple[str, str]:
    """A method with its arguments, or a property with the formula that it is."""
    said = one_line(ast.get_docstring(node) or "")
    if "property" not in marks(node):
        return f"`{signature(node, width=500).removeprefix('def ')}`", said
    formula, before = node.body[-1], node.body[:-1]
    if isinstance(formula, ast.Return) and all(isinstance(each, ast.Expr) for each in before):
        shown = f"`{ast.unparse(formula).removeprefix('return ').replace('self.', '')}`"
        said = f"{said.removesuffix('.')}: {shown}" if said else shown
    return f"`{node.name}`", said
