"""The README's Python example runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def examples():
    """The Python blocks of the README: the use of a model, and the tests of a plugin."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    use, suite = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return use, suite


@pytest.mark.slow
def test_the_example_runs_as_written():
    example, _ = examples()
    assert len(example.strip().splitlines()) <= 14
    done = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b\d{5}\b", done.stdout)


def test_the_suite_of_a_plugin_runs(tmp_path):
    """As written, but for the name: no plugin is called "mine"."""
    _, suite = examples()
    (tmp_path / "test_mine.py").write_text(suite.replace('"mine"', '"streaming_llm"'))
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cpu and well_formed", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_every_file_that_is_linked_exists():
    for page in (ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
