"""Every block of the README runs as it is written, and what its pages install can be had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.requirements import Requirement

from tests.packaging.packages import brought_by, packages, read
from tests.readme import BLOCKS, block, fenced, unnamed
from tests.test_template import PROFILE, kit, make
from topkv.plugins import registry

ROOT = Path(__file__).parent.parent


TEXT = (ROOT / "README.md").read_text("utf-8")


def test_every_block_is_run():
    """By a test of this list, in a fresh environment; the only block of text is the picture."""
    assert not unnamed(TEXT), "name the block in tests/readme.py, and let the file there run it"
    assert [language for language, _ in fenced(TEXT)].count("text") == 1
    for name, (*_, runner) in BLOCKS.items():
        assert block(name)
        assert f'block("{name}")' in (ROOT / runner).read_text("utf-8"), f"{runner} runs no {name}"


@pytest.mark.parametrize(
    "more", ["```console\npip install ./more\n```", "```python\nimport os\n```", "```\nmake\n```"]
)
def test_a_block_that_nothing_runs_is_seen(more):
    assert len(unnamed(f"{TEXT}\n{more}\n")) == 1


def test_a_fence_without_an_end_is_refused():
    with pytest.raises(ValueError, match="close it"):
        unnamed(f"{TEXT}\n```python\n")


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 105, "move what is not for a first look to docs"


@pytest.mark.slow
def test_the_example_runs_as_written():
    """The example runs without Triton's interpreter, which no reader turns on."""
    example = block("model")
    assert len([line for line in example.splitlines() if line]) == 8
    mine = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**mine, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b\d{5}\b", done.stdout)


@pytest.mark.slow
def test_the_method_passes_its_kit(tmp_path):
    """Where ``topkv new`` has written the package; by the worst query head of a lane it fails."""
    new, copied, *_ = block("kit").splitlines()
    assert new == "topkv new mine --kind algorithm"
    root, few = make(tmp_path, "mine", "algorithm"), tmp_path / "few"
    (few / "src").mkdir(parents=True)
    (few / "src" / "few.py").write_text(PROFILE)
    written = root / Path(copied.split()[-1]).relative_to("topkv-mine")
    assert written.exists()
    written.write_text(block("method"))
    done = kit(root, few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 15
    written.write_text(block("method").replace(".amax(2)", ".amin(2)"))
    broken = kit(root, few, "-x", "-k", "cpu and test_every_query_head_finds_its_needle")
    assert broken.returncode == 1, broken.stdout + broken.stderr


def suite():
    """The test file that ``topkv-testing`` shows."""
    page = (ROOT / "tools/testing/README.md").read_text("utf-8")
    (found,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return found


def passed(algorithm, tests, folder):
    """Run the suite of an algorithm in a folder of its own; return how many tests passed: all.

    The suite is as written, but for the name: no plugin is called "mine".
    """
    (folder / "test_mine.py").write_text(suite().replace('"mine"', f'"{algorithm}"'))
    command = [sys.executable, "-m", "pytest", "-q", "-k", tests, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.slow
def test_the_suite_of_a_plugin_runs(tmp_path):
    assert passed("streaming_llm", "cpu and well_formed", tmp_path) == 1


FEW = """
from hypothesis import settings

settings.register_profile("few", max_examples=15)
settings.load_profile("few")
"""

AT_EACH_COMMIT = "streaming_llm"
"""Algorithm for which the suite of that page runs at each commit; each has a suite of its own."""

ALGORITHMS = [
    pytest.param(name, marks=[] if name == AT_EACH_COMMIT else pytest.mark.nightly)
    for name in sorted(
        {each.name for each in registry().records() if each.entry and each.kind == "algorithm"}
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_suite_is_green_on_every_algorithm(algorithm, tmp_path):
    """Few examples, but at night as many as a user has."""
    if settings.get_current_profile_name() != "nightly":
        (tmp_path / "conftest.py").write_text(FEW)
    assert passed(algorithm, "cpu", tmp_path) >= 20


def test_every_file_that_is_linked_exists():
    for page in (ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


PAGES = [
    *(ROOT / page for page in ("README.md", "core/README.md", "docs/index.md")),
    *ROOT.glob("tools/*/README.md"),
]


def installs(page):
    """Lines of ``pip install`` on a page, each with True if wheels were named before."""
    lines = [line.strip().removeprefix("$ ") for line in page.read_text("utf-8").splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("pip install"):
            yield line, any("PIP_FIND_LINKS=" in before for before in lines[:number])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_an_installation_that_a_page_names_can_be_done(page):
    """Folders and extras that it names exist, and extras come from a folder of wheels: no index
    has the packages."""
    known = {package.name: package for package in packages()}
    for line, wheels in installs(page):
        words = [word.strip("'") for word in line.split("#")[0].split()[2:]]
        ours = [Requirement(word) for word in words if word.startswith("topkv")]
        assert wheels or not ours, f"{page}: {line}: no index has {ours[0]}"
        for each in ours:
            assert each.extras <= {*known[each.name].project.get("optional-dependencies", {})}, (
                line
            )
        made = {
            f"./topkv-{name}" for name in re.findall(r"topkv new (\S+)", page.read_text("utf-8"))
        }
        for folder in (word for word in words if word.startswith(".") and word not in made):
            assert (ROOT / folder / "pyproject.toml").exists(), f"{page}: {line}"


def test_what_is_installed_from_a_clone_runs_the_example():
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        (line,) = (line for line, _ in installs(page) if "./core" in line)
        names = {read(ROOT / word).name for word in line.split() if word.startswith("./")}
        kit = ["topkv-testing"] if page.name == "README.md" else []
        assert names == brought_by("topkv-evaluation", "topkv[transformers]", *kit)
