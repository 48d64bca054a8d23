"""The documentation is right: its code runs, its quotes are quotes, its links lead somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import attrs
import pytest
import yaml
from hypothesis import settings

from tests.docs_blocks import (
    DOCS,
    PAGES,
    ROOT,
    blocks_of,
    error_texts,
    files_of,
    fixed_parts,
    table_under,
)
from tests.test_template import PROFILE
from topkv.config import SparseConfig
from topkv.entries import TRAITS
from topkv.plugins.contract import spec_functions
from topkv.plugins.kinds import kinds, page_of, registering
from topkv_cli.render import render
from topkv_testing.kit import KitTests

sys.path.insert(0, str(DOCS / "scripts"))

import diagrams
import figures
import library
import references

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = sorted({b.page for b in BLOCKS if b.language == "python" and not b.mark})
KITS = {
    "tutorial.md": "cpu",
    "sparq.md": "cpu or (interpret and reference)",
    "backend.md": "cpu",
    "transfer.md": "not gpu and not state_machine",
}
"""Pages that build a plugin, and the tests of its kit that are run here."""

STARTS = {"sparq.md": ("sparq", "algorithm", True)}
"""Pages that change what ``topkv new`` writes, and its arguments."""

DRIVER = """
import json, sys
names = {"__name__": "__main__"}
for page, line, text in json.load(open(sys.argv[1])):
    print(f"\\x1e{line}")
    exec(compile("\\n" * (line - 1) + text, f"docs/{page}", "exec"), names)
"""


def python(arguments, folder, path=()):
    """Run Python in a folder with further places to import from; its output."""
    places = [*map(str, path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a page in a folder of their own, and where to import them from."""
    made = {}

    def build(page):
        if page not in made:
            folder = tmp_path_factory.mktemp(page.replace("/", "_").removesuffix(".md"))
            (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
            start = render(*STARTS[page]) if page in STARTS else {}
            for name, text in {**start, **files_of(page)}.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, "utf-8")
            path = [folder]
            if (folder / "pyproject.toml").exists():
                path = [folder / "installed"]
                install(folder, path[0])
            made[page] = folder, path
        return made[page]

    return build


def install(folder, target):
    """``pip install`` of a package, with what is here where the build tool is here."""
    here = ["--no-build-isolation", "--no-index"] if find_spec("hatchling") else []
    python(["-m", "pip", "install", "-q", "--no-deps", *here, "--target", target, "."], folder)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.page}:{b.line}")
def test_every_block_says_what_becomes_of_it(block):
    assert block.mark in ("", "file", "not run", "output", "quoted"), f"unknown mark {block.mark}"
    if block.mark in ("not run", "file", "quoted"):
        assert len(block.value) > 8, "expected a reason or a path behind the colon"
    if block.language in ("console", "bash", "sh", "shell"):
        assert block.mark == "not run", "a shell block says why it is not run"
    assert block.language != "", "a block names its language"


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page, built):
    """Run them in order, in one namespace; they print what the page says."""
    folder, path = built(page)
    run = [b for b in blocks_of(page) if b.language == "python" and not b.mark]
    (folder / "blocks.json").write_text(json.dumps([(b.page, b.line, b.text) for b in run]))
    (folder / "driver.py").write_text(DRIVER)
    printed = {}
    for part in python(["driver.py", "blocks.json"], folder, path).split("\x1e")[1:]:
        line, _, text = part.partition("\n")
        printed[int(line)] = text.strip()
    before = None
    for block in blocks_of(page):
        if block.mark == "output":
            assert printed[before] == block.text.strip(), f"docs/{page}:{block.line}"
        elif block in run:
            before = block.line


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        # What the tutorial builds is less of what sparq.md does.
        pytest.param(page, marks=[pytest.mark.nightly] if page == "tutorial.md" else [])
        for page in PAGES
        if files_of(page)
    ],
)
def test_the_plugin_of_a_page_passes_the_kit(page, built):
    folder, path = built(page)
    tests = [name for name in files_of(page) if name.rpartition("/")[2].startswith("test_")]
    (folder / "few.py").write_text(PROFILE)
    # At night Hypothesis' own profile, which draws the same everywhere too.
    at_night = settings.get_current_profile_name() == "nightly"
    profile = ["--hypothesis-profile=ci"] if at_night else ["-p", "few"]
    options = ["-q", "-p", "no:cacheprovider", *profile, "-k", KITS[page]]
    printed = python(["-m", "pytest", *options, *tests], folder, [*path, folder])
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 15, printed


def test_the_tutorial_builds_the_example():
    for name, text in files_of("tutorial.md").items():
        example = ROOT / "examples" / "arkvale" / name
        assert example.read_text("utf-8") == text, f"examples/arkvale/{name} differs"


def test_the_example_of_the_front_page_is_that_of_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    block = next(b for b in blocks_of("index.md") if b.language == "python")
    assert f"```python\n{block.text}\n```" in readme


QUOTES = [(b, line) for b in BLOCKS if b.mark == "quoted" for line in b.text.splitlines()]


@pytest.mark.parametrize(("block", "quoted"), QUOTES, ids=lambda x: str(x)[:60])
def test_a_quoted_error_stands_in_its_source(block, quoted):
    assert fixed_parts(quoted) in list(error_texts(ROOT / block.value))


YAML = [b for b in BLOCKS if b.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=lambda b: f"{b.page}:{b.line}")
def test_a_configuration_is_one(block):
    SparseConfig.load(yaml.safe_load(block.text))


def anchors(text):
    """Anchors of the headings of a page, as MkDocs makes them."""
    for title in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M):
        slug = re.sub(r"[^\w\s-]", "", title.strip().lower())
        yield re.sub(r"[-\s]+", "-", slug)


def site():
    """Every page of the site, generated ones too, and every file that is there by name."""
    written = {page: path.read_text("utf-8") for page, path in PAGES.items()}
    return {page: text for page, text in written.items() if "/_" not in page} | references.pages()


def test_every_link_of_the_site_leads_somewhere():
    pages = site()
    drawn = {f"images/{name}" for name in (*diagrams.drawings(), *figures.FIGURES)}
    lacking = []
    for page, text in pages.items():
        folder = page.rpartition("/")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
            if re.match(r"https?:|mailto:", target):
                continue
            place, _, anchor = target.partition("#")
            there = os.path.normpath(os.path.join(folder, place)) if place else page
            known = there in pages or there in drawn or (DOCS / there).is_file()
            if not known or (anchor and anchor not in anchors(pages.get(there, ""))):
                lacking.append(f"{page}: {target}")
    assert not lacking


def test_every_page_is_in_the_navigation():
    """Every entry of the navigation is a page; that of stability comes with the page."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"- (?:topkv: )?([\w/-]+\.md)$", text, re.MULTILINE)) | {
        "matrix.md",
        "models.md",
    }
    pages = {page for page in site() if not page.startswith("plugins/")}
    assert pages | {"stability.md"} == named | {"stability.md"}


def test_every_hook_is_documented_with_its_arguments():
    page = references.hook_reference()
    for kind in kinds():
        assert f"`{registering(kind)}`" in page
        module = page_of(kind)
        for name, function in spec_functions(module).items():
            section = page.split(f"### `{name}`", 1)[1].split("\n### ", 1)[0]
            _, *arguments = signature(function).parameters  # less ``self``
            assert f"def {name}({arguments[0] if arguments else ')'}" in re.sub(
                r"\(\n +", "(", section
            )
            assert all(f"{argument}: " in section for argument in arguments), name


def test_what_every_factory_takes_is_documented():
    page = references.hook_reference()
    for kind in kinds():
        module = page_of(kind)
        (setup,) = (value for name, value in vars(module).items() if _is_setup(name, kind))
        section = page.split(f"### `{setup.__name__}`", 1)[1].split("\n### ", 1)[0]
        for field in attrs.fields(setup):
            assert re.search(rf"^\| [^|]*`{field.name}`", section, re.M), f"{kind}.{field.name}"


@pytest.mark.parametrize("module", ["types", "entries"])
def test_every_field_and_property_of_the_types_is_documented(module):
    page = library.types()
    classes = vars(import_module(f"topkv.{module}")).values()
    own = [cls for cls in classes if isinstance(cls, type) and cls.__module__ == f"topkv.{module}"]
    assert len(own) > 1
    for cls in own:
        section = page.split(f"### `{cls.__name__}`", 1)[1].split("\n### ", 1)[0]
        names = [field.name for field in attrs.fields(cls)]
        names += [name for name, value in vars(cls).items() if isinstance(value, property)]
        for name in names:
            row = re.search(rf"^\| [^|]*`{name}`[^|]*\|(.*)\|$", section, re.M)
            assert row, f"{cls.__name__}.{name}"
            assert row[1].strip(), f"{cls.__name__}.{name} has no meaning"


def test_traits_are_documented_with_the_tests_that_ask_for_them():
    page = library.types()
    for trait in TRAITS:
        row = re.search(rf"^\| `{trait}` \|.*\| (.+) \|$", page, re.M)
        assert "`test_" in row[1], trait


def test_what_is_public_for_authors_is_documented():
    """Every name that stability.md promises to authors is on a page of the reference."""
    (row,) = re.findall(
        r"^\| authors of plugins \| (.*) \|$", PAGES["stability.md"].read_text(), re.M
    )
    elsewhere = {"topkv.hookimpl", "topkv.hooks", "topkv_prefixes.storage", "topkv.commands"}
    text = library.functions() + library.types()
    for name in set(re.findall(r"`(topkv\w*\.[\w.]+)`", row)) - elsewhere:
        assert re.search(rf"^## `{name}(\.\w+)?`$", text, re.M), name


def test_what_plugins_import_is_documented():
    """Every function and class that a plugin here imports from a module with a section: a section
    of its own, or a word in the module's introduction."""
    page, missing = library.functions(), set()
    sources = (*ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("examples/*/src/**/*.py"))
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                section = page.partition(f"## `{node.module}`\n")[2].split("\n## ", 1)[0]
                names = [each.name for each in node.names if section and not each.name.isupper()]
                intro = section.partition("\n### ")[0]
                lacking = [
                    name
                    for name in names
                    if f"### `{name}`\n" not in section and f"`{name}`" not in intro
                ]
                missing |= {f"{node.module}.{name} of {path.name}" for name in lacking}
    assert "### `topk`\n" in page
    assert not missing


def test_every_suite_is_documented_with_its_options_and_tests():
    page = library.kit()
    found = [cls for cls in _suites() if f"## `{cls.__name__}`\n" in page]
    # A keeper is called by its own package alone, and host formats by transfer engines.
    assert {cls.kind for cls in found} == set(kinds()) - {"keeper", "kv_format", "host_format"}
    for cls in found:
        section = page.split(f"## `{cls.__name__}`\n", 1)[1].split("\n## ", 1)[0]
        tests = {name for name in dir(cls) if name.startswith("test_")}
        assert tests == set(re.findall(r"^\| `(test_\w+)` \|", section, re.M))
        module = vars(import_module(cls.__module__))
        for options in (value for name, value in module.items() if name.endswith("Options")):
            for field in attrs.fields(options):
                assert re.search(rf"^\| `{field.name}` \|", section, re.M), field.name


def _suites():
    """The suite of each module that the page is made from."""
    for name in library.SUITES:
        module = import_module(f"topkv_testing.{name}")
        own = [each for each in vars(module).values() if isinstance(each, type)]
        own = [each for each in own if each.__module__ == module.__name__]
        yield from (each for each in own if issubclass(each, KitTests))


def test_profiles_are_those_of_the_page():
    _, *rows = table_under(PAGES["reference/_kit.md"].read_text("utf-8"), "More examples")
    profiles = {name.strip("`"): settings.get_profile(name.strip("`")) for name, *_ in rows}
    assert profiles.keys() >= {"default", "ci", "nightly"}
    for name, examples, same, _ in rows:
        profile = profiles[name.strip("`")]
        assert (str(profile.max_examples), same) == (
            examples,
            "yes" if profile.derandomize else "no",
        )


def _is_setup(name, kind):
    return name.lower() == f"{kind.replace('_', '')}setup"


def test_every_key_of_the_configuration_is_documented():
    page = references.configuration()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [
        field.name for field in attrs.fields(SparseConfig)
    ]
