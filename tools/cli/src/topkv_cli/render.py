"""The package that ``topkv new`` writes: files of ``template/`` with a few names put in.

Templates are ``string.Template`` texts whose names end in ``.tmpl``. Templates of a kind are in a
folder of its name, and replace a common template of the same name; those in its folder ``kernels``
replace both in a package that begins with kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from topkv import __version__
from topkv.entries import HOOK_API
from topkv.errors import ConfigError
from topkv.plugins.kinds import kinds

KINDS = {
    "algorithm": "Selection by mean keys, an algorithm for topkv",
    "stage": "Candidates ranked by their keys, a stage for topkv",
    "backend": "Attention by gathering, a backend for topkv",
    "transfer": "Staged copies, a transfer engine for topkv",
    "eviction": "First in, first out, an eviction policy for topkv",
    "topk": "Exact top-k by keys of 64 bits, for topkv",
    "observer": "Counts of forwards, an observer for topkv",
    "storage": "Pages in the memory of the process, a storage for topkv",
}
"""Kinds of plugins, and a summary of the reference that the new package of each kind has."""

LONGEST = 20
"""Characters of a name: with it every rendered line stays within 99 columns."""

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".gitignore": "gitignore",
    ".github/workflows/test.yml": "test.yml",
    "src/$package/__init__.py": "init.py",
    "src/$package/entry.py": "entry.py",
    "src/$package/$kind.py": "$kind.py",
    "tests/conftest.py": "conftest.py",
    "tests/test_conformance.py": "test_conformance.py",
}
"""Template of each path in the package."""

_FURTHER = {"eviction": {"src/$package/kernels.py": "kernels.py"}}
"""Further paths and templates of single kinds."""

WITH_KERNELS = {"algorithm": "Selection by mean keys, an algorithm for topkv with kernels"}
"""Kinds that can begin with kernels beside their reference, and the summary of those packages."""

_PARTS = ("method", "reference", "kernels")
"""Parts of the README."""

_SETTINGS = {
    "observer": '"observers": ["$name"]',
    "stage": '"stages": ["$name"]',
    "storage": '"pages": {"name": "prefixes", "params": {"storage": {"name": "$name"}}}',
}
"""Settings by which a configuration names a plugin, for kinds without one of their name."""

_DOUBLES = {"algorithm": "scripted", "stage": "keep", "backend": "gather", "storage": "shelf"}
"""Plugins of the conformance kit, which stand beside the one under test."""


def render(name: str, kind: str, kernels: bool = False) -> dict[str, str]:
    """Return the texts of a new package by path, relative to its root.

    Args:
        name: name of the plugin, such as ``"mean_keys"``; its package is then ``topkv-mean-keys``.
        kind: one of ``KINDS``.
        kernels: True for device functions beside the reference; of ``WITH_KERNELS`` alone.

    Raises:
        ConfigError: with every reason why the name or the kind cannot be.
    """
    reasons = _name_reasons(name)
    if kind not in KINDS:
        reasons.append(f"kind must be one of {', '.join(KINDS)}, got {kind!r}; choose one of them")
    elif kernels and kind not in WITH_KERNELS:
        reasons.append(
            f"kernels come with kind {', '.join(WITH_KERNELS)}, got {kind!r}; leave --kernels "
            "out: the README of the new package says where its kernels go"
        )
    module = name.replace("-", "_")
    if module == _DOUBLES.get(kind):
        reasons.append(
            f"the conformance kit has {kind} {module!r} of its own; choose another name"
        )
    if reasons:
        raise ConfigError("a plugin package cannot be made", reasons)
    names = _names(name, kind)
    folders = [kind]
    if kernels:
        names["summary"] = WITH_KERNELS[kind]
        folders.insert(0, f"{kind}/kernels")
    names |= {part: _filled(f"{part}.md", names, folders).rstrip() for part in _PARTS}
    templates = _FILES | _FURTHER.get(kind, {})
    return {
        _fill(path, names): _filled(template, names, folders)
        for path, template in templates.items()
    }


def write(texts: Mapping[str, str], root: Path) -> None:
    """Write a rendered package.

    Args:
        texts: from ``render``.
        root: directory of the package, which must not exist.

    Raises:
        ConfigError: it exists, or cannot be made.
    """
    try:
        root.mkdir(parents=True)
        for path, text in texts.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
    except FileExistsError as error:
        reason = "expected a directory that does not exist yet; name another one, or remove it"
        raise ConfigError(f"{error.filename} exists", [reason]) from error
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}; name a directory that can be made"
        raise ConfigError(f"the package cannot be written to {root}", [reason]) from error


def default_root(name: str) -> str:
    """Return the default directory of a package: the name of its distribution."""
    return f"topkv-{name.replace('_', '-')}"


_STANDS_ON = {
    **dict.fromkeys(("algorithm", "backend", "stage"), "topkv-authoring"),
    "storage": "topkv-prefixes",
}
"""Packages beside the core that the templates of kinds stand on."""


def _names(name: str, kind: str) -> dict[str, str]:
    module = name.replace("-", "_")
    camel = "".join(part.capitalize() for part in module.split("_"))
    major, minor = map(int, __version__.split(".")[:2])
    below = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"
    spread = f">={major}.{minor},<{below}"
    needed = ["topkv", *([_STANDS_ON[kind]] if kind in _STANDS_ON else [])]
    return {
        "name": module,
        "kind": kind,
        "setting": _fill(_SETTINGS.get(kind, '"$kind": "$name"'), {"kind": kind, "name": module}),
        "dist": default_root(name),
        "package": f"topkv_{module}",
        "cls": f"{camel}{kind.capitalize()}",
        "kernel_cls": f"{camel}Kernels",
        "summary": KINDS[kind],
        "contract": kinds()[kind],
        "range": spread,
        "depends": ", ".join(f'"{each}{spread}"' for each in needed),
        "hook_api": str(HOOK_API),
    }


def _filled(template: str, names: Mapping[str, str], folders: Sequence[str]) -> str:
    """Fill the template of the first of ``folders`` that has one of this name, or the common."""
    root, name = files("topkv_cli") / "template", f"{_fill(template, names)}.tmpl"
    own = [root / folder / name for folder in folders]
    at = next((path for path in own if path.is_file()), root / name)
    return _fill(at.read_text(encoding="utf-8"), names)


def _fill(text: str, names: Mapping[str, str]) -> str:
    return Template(text).substitute(names)


def _name_reasons(name: str) -> list[str]:
    reasons = []
    if not _NAME.fullmatch(name):
        reasons.append(
            "the name must be lower-case letters and digits, in words that begin with a letter or "
            f"a digit (the first with a letter) with one - or _ between them, got {name!r}; "
            "write it like mean-keys"
        )
    if re.match(r"topkv[-_]", name):
        reasons.append(
            f"the name must be without topkv-, which the package gets anyway, got {name!r}; "
            f"write {name[6:]}"
        )
    if len(name) > LONGEST:
        reasons.append(
            f"the name must have at most {LONGEST} characters, got {len(name)}; shorten it"
        )
    return reasons
