"""The pages of packages and of plugins of others are complete, and their rows have their form."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs_blocks import PAGES, ROOT
from tests.packaging.packages import packages
from tests.test_packages import PLUGINS, entries_of
from topkv.entries import HOOK_API, KINDS

KEYWORD = "topkv-plugin"

LINKED = re.compile(r"\[(.+)\]\((\S+)\)")


def rows_of(page):
    """Rows of the only table of a page, its head first."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def kind_of(package):
    """Kind that the page of packages says: of the plugins, or of what is none."""
    if package in PLUGINS:
        return ", ".join(dict.fromkeys(entry.kind for entry in entries_of(package)))
    if package.name == "topkv":
        return "core"
    commands = package.project.get("entry-points", {}).get("topkv.commands")
    return "command" if commands or package.name == "topkv-cli" else "library"


def test_every_package_is_on_the_page_with_its_kind():
    head, _, *rows = rows_of(PAGES["packages.md"].read_text("utf-8"))
    assert head == ["package", "kind", "content", "leave it out"]
    named = [re.findall(r"`(topkv[\w-]*)`", name) for name, *_ in rows]
    assert {name: kind for (name,), (_, kind, *_) in zip(named, rows, strict=True)} == {
        package.name: kind_of(package) for package in packages()
    }
    assert len(rows) == len(packages())
    for name, _, content, out in rows:
        assert min(len(content), len(out)) > 10, name


def test_a_plugin_leads_to_its_page():
    _, _, *rows = rows_of(PAGES["packages.md"].read_text("utf-8"))
    links = {name: LINKED.fullmatch(name) for name, *_ in rows}
    found = {match[1].strip("`"): match[2] for match in links.values() if match}
    for package in PLUGINS:
        assert found[package.name] == f"plugins/{package.folder.name}.md"


def wrong_with(row):
    """Reasons against a row of the directory."""
    name, kind, api, kit, link = row
    reasons = []
    if not re.fullmatch(r"`[a-z0-9]+(-[a-z0-9]+)*`", name):
        reasons.append(f"package must be the name of a distribution in backticks, got {name}")
    if kind not in KINDS:
        reasons.append(f"kind must be one of {', '.join(KINDS)}, got {kind}")
    if not re.fullmatch(r"\d+\.\d+", api) or int(api.partition(".")[0]) != HOOK_API[0]:
        reasons.append(f"hook API must be {HOOK_API[0]}.MINOR, got {api}: topkv refuses others")
    suite = re.fullmatch(
        r"`(topkv_testing\.\w+)` on ((cpu|interpret|gpu)(, (interpret|gpu))*)", kit
    )
    if not suite:
        reasons.append(f"kit must be `topkv_testing.SUITE` on tiers, got {kit}")
    if not LINKED.fullmatch(link):
        reasons.append(f"link must be [text](address), got {link}")
    return reasons


DIRECTORY = PAGES["directory.md"].read_text("utf-8")


def test_rows_of_the_directory_have_their_form():
    head, _, *rows = rows_of(DIRECTORY)
    assert head == ["package", "kind", "hook API", "kit", "link"]
    assert not [reason for row in rows for reason in wrong_with(row)]
    names = [name for name, *_ in rows]
    assert names == sorted(set(names)), "one row a package, in order"
    ours = {f"`{package.name}`" for package in packages()}
    assert not ours & set(names), "packages of this project are on the page of packages"


GOOD = ["`topkv-mine`", "algorithm", "3.0", "`topkv_testing.algorithms` on cpu", "[a](https://b)"]


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        (0, "topkv-mine"),
        (0, "`topkv mine`"),
        (1, "selector"),
        (2, "2"),
        (2, "1.4"),
        (3, "passes"),
        (3, "`topkv_testing.algorithms`"),
        (3, "`topkv_testing.algorithms` on tpu"),
        (4, "https://b"),
    ],
)
def test_a_row_of_another_form_is_refused(column, cell):
    assert not wrong_with(GOOD)
    assert len(wrong_with([*GOOD[:column], cell, *GOOD[column + 1 :]])) == 1


def test_the_row_of_the_example_is_what_its_package_says():
    from topkv_arkvale import entry

    (mine,) = entry.topkv_register_algorithms()
    _, _, *rows = rows_of(DIRECTORY)
    (row,) = (row for row in rows if row[0] == "`topkv-arkvale`")
    tiers = ", ".join(mine.capabilities.tiers)
    api = ".".join(map(str, mine.hook_api))
    assert row[1:4] == [mine.kind, api, f"`topkv_testing.algorithms` on {tiers}"]


def test_what_the_page_asks_for_is_in_the_examples():
    """``examples/minimal`` is what ``topkv new`` writes."""
    assert f"`{KEYWORD}`" in DIRECTORY
    for name in ("arkvale", "minimal"):
        text = (ROOT / "examples" / name / "pyproject.toml").read_text("utf-8")
        assert KEYWORD in tomllib.loads(text)["project"]["keywords"]
