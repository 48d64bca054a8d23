"""The fenced blocks of the documentation, and what tests do with each.

The comment in the line before a block says what::

    <!-- not run: REASON -->     it is not run, and why
    <!-- output -->              what the block of Python before it prints
    <!-- quoted: PATH -->        error texts of that source, values as ``{...}``

A block with a title is a part of the file of that name; parts follow each other. Any other block
of Python without a comment is run: those of a page in order, in one namespace.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path below docs.
        line: number of its first line of text, from 1.
        language: the word behind the fence.
        mark, value: ``<!-- mark: value -->`` before it, or ``file`` and its title, or both empty.
    """

    page: str
    line: int
    language: str
    mark: str
    value: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    lines = PAGES[page].read_text("utf-8").splitlines()
    start, language, title = None, "", ""
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"```([\w-]*)(?: title=\"(.+)\")?", line.strip())
        if fence and start is None:
            start, language, title = number, fence[1], fence[2]
        elif line.strip() == "```" and start is not None:
            before = lines[start - 1] if start else ""
            reported = re.fullmatch(r"<!-- ([a-z ]+?)(?:: (.+))? -->", before)
            mark, value = (reported[1], reported[2] or "") if reported else ("", "")
            if title:
                mark, value = "file", title
            text = "\n".join(lines[start + 1 : number])
            found.append(Block(page, start + 2, language, mark, value, text))
            start = None
    if start is not None:
        raise ValueError(f"docs/{page}: the block of line {start + 1} has no end")
    return found


def files_of(page: str) -> dict[str, str]:
    """The files that a page builds, by path: their blocks joined as a formatter would."""
    files: dict[str, str] = {}
    for block in blocks_of(page):
        if block.mark == "file":
            gap = "\n" if block.text.startswith(" ") else "\n\n"
            known = files.get(block.value)
            files[block.value] = (known + gap if known else "") + block.text + "\n"
    return files


def error_texts(path: Path) -> Iterator[list[str]]:
    """Every string of a source as the fixed parts around its values."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [""]
            for part in node.values:
                if isinstance(part, ast.Constant):
                    parts[-1] += str(part.value)
                else:
                    parts.append("")
            yield parts
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield [node.value]


def fixed_parts(quoted: str) -> list[str]:
    """Split a quoted text at its values, which are written as ``{...}``."""
    return re.split(r"\{[^}]*\}", quoted)


def table_under(text: str, heading: str) -> list[list[str]]:
    """The first table below a heading of a page, its head first: rows of cells."""
    section = re.split(rf"^##+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    found = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.MULTILINE | re.DOTALL)
    lines = found[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in [lines[0], *lines[2:]]]
