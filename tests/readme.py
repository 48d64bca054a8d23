"""The fenced blocks of the README by name, and the test that runs each.

A block is named by how it begins, so that nothing shows on the page.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NEWCOMER = "tests/packaging/newcomer.py"

BLOCKS = {
    "install": ("console", "pip install torch", NEWCOMER),
    "model": ("python", "import topkv\n", NEWCOMER),
    "serve": ("console", "topkv serve MODEL", "plugins/vllm/tests/test_readme.py"),
    "method": ("python", "import torch\n", NEWCOMER),
    "kit": ("console", "topkv new", NEWCOMER),
}
"""Language, beginning, and the file that runs it in a fresh environment, of each block by name.
``make newcomer`` and ``make test-vllm`` make the environments."""


def fenced(text: str) -> list[tuple[str, str]]:
    """Languages and texts of the fenced blocks of a page.

    Raises:
        ValueError: a block has no end.
    """
    if len(re.findall(r"^```", text, re.MULTILINE)) % 2:
        raise ValueError("the README has a fence without an end; close it")
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def block(name: str) -> str:
    """The text of the block of a name.

    Raises:
        ValueError: the README has none, or several that begin so.
    """
    language, start, _ = BLOCKS[name]
    page = (ROOT / "README.md").read_text("utf-8")
    found = [text for kind, text in fenced(page) if kind == language and text.startswith(start)]
    if len(found) != 1:
        raise ValueError(
            f"the README must have one block of {language} that begins with {start!r}, got "
            f"{len(found)}; change its entry {name!r} in tests/readme.py with the page"
        )
    return found[0]


def unnamed(text: str) -> list[str]:
    """The blocks of a page that nothing runs, pictures (```` ```text ````) left out."""
    known = [(language, start) for language, start, _ in BLOCKS.values()]
    return [
        block
        for language, block in fenced(text)
        if language != "text"
        and not any(language == kind and block.startswith(start) for kind, start in known)
    ]
