"""Pages that are made from the sources: hooks, configuration, plugins, what the repository says.

Sources are parsed, never imported: the build of the site needs neither torch nor topkv.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import library
from docstrings import CORE, KIT, ROOT, SOURCES, class_of, function, marks, plain, table, tree_of

KINDS = {
    "algorithm": "Algorithm",
    "backend": "Attention backend",
    "transfer": "Transfer engine",
    "eviction": "Eviction policy",
    "topk": "Exact top-k",
    "engine": "Engine integration",
    "observer": "Observer",
    "stage": "Stage",
    "keeper": "Keeper",
    "kv_format": "KV format",
    "host_format": "Host format",
}
"""Modules of ``topkv.hooks`` in the order of the page, and their titles."""

TEXTS = {
    "design.md": "DESIGN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "raw-numbers.md": "benchmarks/results/README.md",
    "cli.md": "tools/cli/README.md",
    "evaluation.md": "tools/evaluation/README.md",
    "lm_eval.md": "tools/lm_eval/README.md",
    "bench.md": "tools/bench/README.md",
}
"""Pages that are files of the repository as they are."""


def pages() -> dict[str, str]:
    """Every generated page: Markdown by its path in the site."""
    made = {
        "reference/hooks.md": hook_reference(),
        "reference/configuration.md": configuration(),
        "reference/types.md": library.types(),
        "reference/library.md": library.functions(),
        "reference/kit.md": library.kit(),
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


# Hooks.


def hook_reference() -> str:
    """A section for each kind of plugin, with every hook spec: of the core, and of prefixes."""
    api = re.search(r"HOOK_API = \((\d+), (\d+)\)", (CORE / "entries.py").read_text("utf-8"))
    assert api
    parts = [
        "# Hooks",
        "Made from the hook specs in `core/src/topkv/hooks`, and that of storages in "
        "`topkv_prefixes.storage`; hook API "
        f"{api[1]}.{api[2]}. Types and letters (B, H, Hkv, N, K, C, T) are those of "
        "[Types](types.md); [Order of calls](../calls.md) says when each hook is called.",
    ]
    parts += _kind(CORE / "plugins" / "discovery.py", "Registration")
    for module, title in KINDS.items():
        parts += _kind(CORE / "hooks" / f"{module}.py", title)
    parts += _kind(SOURCES["topkv_prefixes"] / "storage.py", "Storage")
    return "\n\n".join([*parts, ""])


def _kind(path: Path, title: str) -> Iterator[str]:
    tree = tree_of(path)
    yield f"## {title}"
    yield plain(ast.get_docstring(tree) or "")
    for node in tree.body:
        hooks = [each for each in getattr(node, "body", []) if _is_hook(each)]
        if isinstance(node, ast.ClassDef) and not hooks:
            yield from class_of(node)
        for each in [node] if _is_hook(node) else hooks:
            optional = " (optional)" if "optional" in marks(each) else ""
            yield from function(each, f"### `{each.name}`{optional}")


def _is_hook(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and "hookspec" in marks(node)


# Configuration.


def configuration() -> str:
    """Every key of ``SparseConfig``: type, topkv's own default if it is a constant, meaning."""
    tree = tree_of(CORE / "config" / "settings.py")
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
    """A Markdown file, its links fixed: to pages of the site, else to nothing but their text."""
    text = path.read_text("utf-8")
    here = next(
        (f"plugins/{name}.md" for name, readme in plugin_readmes().items() if readme == path),
        next((page for page, name in TEXTS.items() if ROOT / name == path), ""),
    )
    return re.sub(
        r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", lambda m: _fixed(m[1], m[2], path.parent, here), text
    )


def _fixed(label: str, target: str, folder: Path, here: str) -> str:
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
    if file in (KIT, KIT.parents[1], KIT.parents[1] / "README.md"):
        return "reference/kit.md"
    if file.is_relative_to(ROOT / "docs") and file.suffix == ".md":
        return str(file.relative_to(ROOT / "docs"))
    return None
