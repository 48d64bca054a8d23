"""Files, the spine of the core as a whole, and selectors are short enough to be read at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.packaging.packages import ROOT

MOST = 400

SPINE = ("coordinator.py", "prompts", "requests", "assembly", "decode")
"""The path of a step in ``core/src/topkv``: DESIGN.md says in which order to read it."""

SPINE_MOST = 2460
"""Most lines of the spine: an hour of reading. 2,300, and 160 for several queries a row."""

QUEST_MOST = 220
"""Most lines of Quest, the smallest method with kernels: entry, reference and device functions."""

MEDIAN_MOST = 500
"""Most lines of the selector in the middle. It comes down towards 300, and never goes up."""

FOLDERS = ("core", "plugins", "tools", "tests", "benchmarks", "examples", "docs/scripts")
"""Folders of sources; there is no git to ask in an unpacked archive."""

MADE = {".venv", "build", "dist"}
"""Folders that tools fill, see ``.gitignore``."""


def sources_in(root: Path) -> Iterator[Path]:
    """The Python files of a checkout that people wrote."""
    yield from root.glob("*.py")
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            if not MADE & {*path.relative_to(root).parts}:
                yield path


def too_long(root: Path) -> list[str]:
    """``path: lines`` of each file of more than ``MOST`` lines, the longest first."""
    counts = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources_in(root)
    }
    longest = sorted(counts, key=lambda path: (-counts[path], path))
    return [f"{path.relative_to(root)}: {counts[path]}" for path in longest if counts[path] > MOST]


def test_every_source_folder_is_looked_at():
    tops = {path.relative_to(ROOT).as_posix() for path in sources_in(ROOT)}
    for folder in FOLDERS:
        assert any(path.startswith(f"{folder}/") for path in tops), folder
    assert {"conftest.py", "core/src/topkv/__init__.py", "tests/test_lengths.py"} <= tops


def test_no_file_is_too_long():
    found = too_long(ROOT)
    assert not found, f"files of more than {MOST} lines:\n" + "\n".join(found)


def test_the_spine_can_be_read_in_an_hour():
    core = ROOT / "core/src/topkv"
    files = [path for name in SPINE for path in [core / name, *(core / name).glob("*.py")]]
    lines = {
        path.relative_to(core).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in files
        if path.is_file()
    }
    total = sum(lines.values())
    assert total <= SPINE_MOST, f"{total} lines of at most {SPINE_MOST}: {lines}"


def selectors(plugins: Path) -> dict[str, int]:
    """Lines of the sources of each package of ``plugins`` that offers an algorithm."""
    found = {}
    for package in sorted(plugins.iterdir()):
        texts = [path.read_text("utf-8") for path in sorted((package / "src").rglob("*.py"))]
        if any('kind="algorithm"' in text for text in texts):
            found[package.name] = sum(len(text.splitlines()) for text in texts)
    return found


def test_quest_is_a_method_with_kernels_that_fits_on_few_pages():
    lines = selectors(ROOT / "plugins")["quest"]
    assert lines <= QUEST_MOST, f"{lines} lines of at most {QUEST_MOST}"


def test_the_selector_in_the_middle_is_short():
    lines = selectors(ROOT / "plugins")
    assert len(lines) > 8, "algorithms were not found"
    middle = median(lines.values())
    assert middle <= MEDIAN_MOST, f"{middle} lines of at most {MEDIAN_MOST}: {lines}"


def test_selectors_are_found_by_their_entries(tmp_path):
    for name, kind in (("a", "algorithm"), ("b", "stage")):
        source = tmp_path / name / "src" / f"topkv_{name}"
        source.mkdir(parents=True)
        (source / "__init__.py").write_text("# a\n" * 3)
        (source / "entry.py").write_text(f'PluginEntry(\n    kind="{kind}",\n)\n')
    assert selectors(tmp_path) == {"a": 6}


def test_long_files_are_found(tmp_path):
    sizes = {"core/a.py": MOST, "core/b.py": MOST + 1, "tests/deep/c.py": 900, "d.py": 500}
    for name, lines in {**sizes, "core/.venv/e.py": 999, "plugins/x/build/f.py": 999}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)
    assert too_long(tmp_path) == ["tests/deep/c.py: 900", "d.py: 500", "core/b.py: 401"]
