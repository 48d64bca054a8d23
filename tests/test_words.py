"""Docstrings and headings begin with the thing that they are about, or with a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.packaging.packages import ROOT
from tests.test_lengths import sources_in

OPENINGS = re.compile(r"(What|Whether|Of|Those|The same)\b")
"""Words whose noun comes later, so that a reader has to go back."""

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
            told = isinstance(text, ast.Constant) and isinstance(text.value, str)
            named = at and isinstance(body[at - 1], (ast.Assign, ast.AnnAssign))
            if told and (named or (whole and at == 0)):
                yield each.lineno, text.value


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
