"""``python haystack.py``: the haystack of the needle tasks, made of this repository's own prose.

RULER hides its needles in essays that nobody may pass on. The text of ``haystack.txt.xz`` instead
is pinned: run this only to make another one, under another name, or old results mean nothing.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = (
    "DESIGN.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "core/*.md",
    "plugins/*/*.md",
    "tools/*/*.md",
)
TARGET = ROOT / "tools/evaluation/src/topkv_evaluation/tasks/data/haystack.txt.xz"
FEWEST, MOST = 5, 80
"""Fewest and most words of a sentence; others are leftovers of tables and code."""

BLOCKS = re.compile(r"```.*?```|~~~.*?~~~|<!--.*?-->", re.DOTALL)
DROPPED = re.compile(r"\s*(\||#|    |!\[|\$|>|<)")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
MARK = re.compile(r"^\s*([-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences(page: str) -> Iterator[str]:
    """Yield sentences of a page of Markdown, without code, tables, headings and links."""
    kept = [line for line in BLOCKS.sub("", page).splitlines() if not DROPPED.match(line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", "\n".join(kept)):
        text = LINK.sub(r"\1", MARK.sub("", paragraph)).replace("`", "").replace("**", "")
        for sentence in END.split(" ".join(text.split())):
            if not sentence.isascii():
                continue  # a tokenizer of bytes has room for nothing else
            if sentence[-1:] in (".", "!", "?") and FEWEST <= len(sentence.split()) <= MOST:
                yield sentence


def main() -> None:
    """Write the haystack, a sentence a line, each once."""
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [text for path in paths for text in sentences(path.read_text(encoding="utf-8"))]
    TARGET.write_bytes(lzma.compress(("\n".join(dict.fromkeys(found)) + "\n").encode(), preset=9))


if __name__ == "__main__":
    main()
