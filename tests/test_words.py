"""Subjects of docstrings and headings come first, and plain words are used everywhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.packages import ROOT
from tests.test_lengths import sources_in

OPENINGS = re.compile(r"(What|Whether|Of|Those|The same)\b")
"""Words whose noun comes later, so that a reader has to go back."""

REFUSED = {
    r"told|tells?": "says, reports, gets or calls",
    r"mend(s|ed|ing)?": "fix",
    r"lies": "is, or is stored",
    r"go(es)? by": "uses",
    r"so many": "the number, N, or this many",
}
"""Words with a plainer one: patterns, and the words to use."""

PLAINER = re.compile("|".join(rf"\b({each})\b" for each in REFUSED), re.IGNORECASE)

IN_NAMES = re.compile(r"(^|_)(told|tells?|mend|mended|lies)(_|$)", re.IGNORECASE)

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(
        path for top in ("plugins", "tools", "examples") for path in ROOT.glob(f"{top}/*/*.md")
    ),
]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and texts of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        whole = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for at, each in enumerate(body):
            text = each.value if isinstance(each, ast.Expr) else None
            said = isinstance(text, ast.Constant) and isinstance(text.value, str)
            named = at and isinstance(body[at - 1], (ast.Assign, ast.AnnAssign))
            if said and (named or (whole and at == 0)):
                yield each.lineno, text.value


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Lines and texts of all strings and comments; an f-string has one for each fixed part."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names(source: str) -> Iterator[tuple[int, str]]:
    """Lines and names that a module defines: functions, classes, arguments and variables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def headings(text: str) -> Iterator[str]:
    """Headings of a page outside its blocks of code."""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (found := re.match(r"#+ (.+)", line)):
            yield found[1]


def test_docstrings_begin_with_their_subject():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sources_in(ROOT)
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if OPENINGS.match(text)
    ]
    assert not found, "\n".join(found)


def test_headings_begin_with_their_subject():
    found = [
        f"{path.relative_to(ROOT)}: {heading}"
        for path in PAGES
        for heading in headings(path.read_text(encoding="utf-8"))
        if OPENINGS.match(heading)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_plainer_words(page):
    found = [
        f"{number}: {line.strip()}: {PLAINER.search(line)[0]}"
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if PLAINER.search(line)
    ]
    assert not found, f"{page}: use {REFUSED}\n" + "\n".join(found)


def test_docstrings_comments_and_messages_use_the_plainer_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()}: {PLAINER.search(text)[0]}"
        for path in sources_in(ROOT)
        if path != Path(__file__)
        for line, text in texts(path.read_text(encoding="utf-8"))
        if PLAINER.search(text)
    ]
    assert not found, f"use {REFUSED}\n" + "\n".join(found)


def test_names_use_the_plainer_words():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources_in(ROOT)
        for line, name in names(path.read_text(encoding="utf-8"))
        if IN_NAMES.search(name)
    ]
    assert not found, f"use {REFUSED}\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'def a():\n    """Of what it was told."""\n',
        'raise ValueError(f"{a}; mend {b}")\n',
        "# It lies there.\n",
        'a = "it goes by the first"\n',
        'a = "room for so many"\n',
    ],
)
def test_each_plainer_word_and_place_is_seen(source):
    assert [text for _, text in texts(source) if PLAINER.search(text)]


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "def tells(): 0",
        "class Told: 0",
        "def a(mend): 0",
        "a.mended = 1",
        "def test_it_is_told_at_once(): 0",
    ],
)
def test_each_place_of_a_name_is_seen(source):
    assert [name for _, name in names(source) if IN_NAMES.search(name)]


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module has."""\n',
        'class A:\n    """Whether it is."""\n',
        'def a():\n    """Of all the first."""\n',
        'async def a():\n    """Those that wait."""\n',
        'A = 1\n"""The same of B."""\n',
    ],
)
def test_each_opening_and_place_is_seen(source):
    (text,) = (text for _, text in docstrings(source))
    assert OPENINGS.match(text)


def test_texts_and_code_are_not_taken_for_docstrings_and_headings():
    assert not list(docstrings('def a():\n    b()\n    """What."""\n'))
    assert list(headings("# A\n```\n# What\n```\n## B")) == ["A", "B"]
