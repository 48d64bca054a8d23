"""Pages that are made from the sources: hooks, configuration, plugins, what the repository says.

Sources are parsed, never imported: the build of the site needs neither torch nor topkv.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "topkv"

KINDS = {
    "registry": "Registration",
    "algorithm": "Algorithm",
    "backend": "Attention backend",
    "transfer": "Transfer engine",
    "eviction": "Eviction policy",
    "topk": "Exact top-k",
    "engine": "Engine integration",
    "observer": "Observer",
}
"""Modules of ``topkv.hooks`` in the order of the page, and their titles."""

TEXTS = {
    "design.md": "DESIGN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "raw-numbers.md": "benchmarks/results/README.md",
    "cli.md": "tools/cli/README.md",
    "evaluation.md": "tools/evaluation/README.md",
}
"""Pages that are files of the repository as they are."""


def pages() -> dict[str, str]:
    """Every generated page: Markdown by its path in the site."""
    made = {
        "reference/hooks.md": hook_reference(),
        "reference/configuration.md": configuration(),
    }
    for name, readme in plugin_readmes().items():
        made[f"plugins/{name}.md"] = page_of(readme)
    for page, text in TEXTS.items():
        made[page] = page_of(ROOT / text)
    return made


def plugin_readmes() -> dict[str, Path]:
    """The README of each plugin and example, by name."""
    found = [*ROOT.glob("plugins/*/README.md"), ROOT / "examples" / "arkvale" / "README.md"]
    return {path.parent.name: path for path in sorted(found, key=lambda path: path.parent.name)}


# Docstrings.


def plain(text: str) -> str:
    """reStructuredText of a docstring as Markdown: literals, and blocks behind ``::``."""
    lines, block = [], False
    for line in text.splitlines():
        if block and line.strip() and not line.startswith("    "):
            lines.append("```")
            block = False
        if not block and line.rstrip().endswith("::"):
            lines += [line.rstrip()[:-1], "", "```python"]
            block = True
            continue
        lines.append(line.removeprefix("    ") if block else line.replace("``", "`"))
    return "\n".join([*lines, "```"] if block else lines).replace("```python\n\n", "```python\n")


def sections(doc: str) -> dict[str, str]:
    """A docstring by section: "" for its text, then Args, Returns, Raises, Attributes."""
    found, name = {"": ""}, ""
    for line in doc.splitlines():
        head = re.fullmatch(r"(Args|Returns|Raises|Attributes):", line)
        if head:
            name = head[1]
            found[name] = ""
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


# Hooks.


def hook_reference() -> str:
    """A section for each kind of plugin, with every hook spec of ``topkv.hooks``."""
    api = re.search(r"HOOK_API = \((\d+), (\d+)\)", (CORE / "entries.py").read_text("utf-8"))
    assert api
    parts = [
        "# Hooks",
        "Made from the hook specs in `core/src/topkv/hooks`; hook API "
        f"{api[1]}.{api[2]}. Types and letters (B, H, Hkv, N, K, C, T) are those of "
        "`topkv.types`, at the end of this page.",
    ]
    for module, title in KINDS.items():
        parts += _kind(CORE / "hooks" / f"{module}.py", title)
    return "\n\n".join([*parts, *_types(), ""])


def _kind(path: Path, title: str) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    yield f"## {title}"
    yield plain(ast.get_docstring(tree) or "")
    for node in tree.body:
        hooks = [each for each in getattr(node, "body", []) if _is_hook(each)]
        if isinstance(node, ast.ClassDef) and not hooks:
            yield from _class(node)
        for each in [node] if _is_hook(node) else hooks:
            yield from _hook(each, optional="optional" in _marks(each))


def _marks(node: ast.AST) -> list[str]:
    return [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]


def _is_hook(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and "hookspec" in _marks(node)


def _hook(node: ast.FunctionDef, optional: bool) -> Iterator[str]:
    found = sections(ast.get_docstring(node) or "")
    yield f"### `{node.name}`" + (" (optional)" if optional else "")
    yield f"```python\n{_signature(node)}\n```"
    yield plain(found.pop(""))
    for name, text in found.items():
        if name == "Returns":
            yield f"**Returns** {' '.join(text.split()).replace('``', '`')}"
        else:
            column = "argument" if name == "Args" else "error"
            rows = [(f"`{item}`".replace(", ", "`, `"), told) for item, told in items(text)]
            yield table((column, "meaning"), rows)


def _signature(node: ast.FunctionDef) -> str:
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 90:
        return line
    arguments = "".join(f"    {ast.unparse(argument)},\n" for argument in node.args.args)
    return f"def {node.name}(\n{arguments}){returns}"


def _types() -> Iterator[str]:
    yield "## Types"
    for path in (CORE / "types.py", CORE / "entries.py"):
        tree = ast.parse(path.read_text("utf-8"))
        if path.name == "types.py":
            yield plain(ast.get_docstring(tree) or "")
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield from _class(node)


def _class(node: ast.ClassDef) -> Iterator[str]:
    found = sections(ast.get_docstring(node) or "")
    yield f"### `{node.name}`"
    yield plain(found[""])
    if "Attributes" in found:
        listed = items(found["Attributes"])
        rows = [(f"`{item}`".replace(", ", "`, `"), told) for item, told in listed]
        yield table(("attribute", "meaning"), rows)


# Configuration.


def configuration() -> str:
    """Every key of ``SparseConfig``: type, topkv's own default if it is a constant, meaning."""
    tree = ast.parse((CORE / "config" / "settings.py").read_text("utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    rows: list[tuple[str, ...]] = []
    for name in ("LayerSettings", "Settings", "SparseConfig"):
        body = classes[name].body
        rows += [_setting(*pair) for pair in pairwise(body) if isinstance(pair[0], ast.AnnAssign)]
    text = (ROOT / "docs" / "reference" / "_configuration.md").read_text("utf-8")
    return text.replace("TABLE", table(("key", "type", "default", "meaning"), rows))


def _setting(field: ast.AnnAssign, below: ast.stmt) -> tuple[str, ...]:
    """The row of ``name: type = setting(check, default)`` and the docstring below it."""
    name = ast.unparse(field.target)
    if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
        raise ValueError(f"the setting {name} has no docstring below it")
    kind = re.sub(r" \| (None|Unset)$", "", ast.unparse(field.annotation))
    kind = "int | str" if kind == "Size" else kind
    call = field.value
    default = call.args[1] if isinstance(call, ast.Call) and len(call.args) > 1 else None
    shown = f"`{ast.literal_eval(default)}`" if default else ""
    return (
        f"`{name}`",
        f"`{kind}`",
        shown,
        " ".join(str(below.value.value).split()).replace("``", "`"),
    )


# Files of the repository as pages.


def page_of(path: Path) -> str:
    """A Markdown file, its links mended: to pages of the site, else to nothing but their text."""
    text = path.read_text("utf-8")
    here = next(
        (f"plugins/{name}.md" for name, readme in plugin_readmes().items() if readme == path),
        next((page for page, name in TEXTS.items() if ROOT / name == path), ""),
    )
    return re.sub(
        r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", lambda m: _mended(m[1], m[2], path.parent, here), text
    )


def _mended(label: str, target: str, folder: Path, here: str) -> str:
    if re.match(r"https?://|#|mailto:", target):
        return f"[{label}]({target})"
    place, _, anchor = target.partition("#")
    file = (folder / place).resolve()
    page = site_page(file)
    if page is None:
        return label if label.startswith("`") else f"{label} (`{file.relative_to(ROOT)}`)"
    up = "../" * here.count("/")
    return f"[{label}]({up}{page}{'#' + anchor if anchor else ''})"


def site_page(file: Path) -> str | None:
    """The page that shows a file or folder of the repository; None if there is none."""
    if file == ROOT / "README.md":
        return "index.md"
    for name, readme in plugin_readmes().items():
        if file in (readme, readme.parent):
            return f"plugins/{name}.md"
    for page, name in TEXTS.items():
        if file in (ROOT / name, (ROOT / name).parent) and (ROOT / name).parent != ROOT:
            return page
        if file == ROOT / name:
            return page
    if file == CORE / "hooks":
        return "reference/hooks.md"
    if file.is_relative_to(ROOT / "docs") and file.suffix == ".md":
        return str(file.relative_to(ROOT / "docs"))
    return None
