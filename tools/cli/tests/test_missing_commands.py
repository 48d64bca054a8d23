"""Commands that are not here: who brings them, and what leaves them out."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from topkv_cli import group

ROOT = Path(__file__).parents[3]


def refused(name):
    done = CliRunner().invoke(group.topkv, [name, "--model", "llama", "more"])
    assert done.exit_code == 2
    return done.stderr


def test_every_command_of_the_repository_is_known_with_what_brings_it():
    found, extras = {}, {}
    for path in ROOT.glob("*/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        points = project.get("entry-points", {}).get("topkv.commands", {})
        brings = [
            extra
            for extra, lines in project.get("optional-dependencies", {}).items()
            if any(line.startswith("topkv[cli]") for line in lines)
        ]
        needs = not any(line.startswith("topkv[cli]") for line in project["dependencies"])
        extras = f"[{brings[0]}]" if needs and brings else ""
        found |= dict.fromkeys(points, project["name"] + extras)
    assert found == group.ELSEWHERE


@pytest.mark.parametrize("name", ["bench", "storage"])
def test_a_command_that_is_not_installed_is_named_with_its_package(monkeypatch, name):
    monkeypatch.setattr("topkv_cli.group.entry_points", lambda group: [])
    reported = refused(name)
    install = {"bench": "pip install topkv-bench", "storage": "pip install 'topkv-files[cli]'"}
    assert f"there is no command {name!r} here" in reported
    assert install[name] in reported
    assert "No such command" in refused("nonsense")


def test_a_command_that_is_left_out_is_not_called_missing(monkeypatch):
    class Point(EntryPoint):
        dist = SimpleNamespace(name="topkv-more", version="9")

    point = Point("bench", "topkv_more:bench", group.COMMANDS)
    monkeypatch.setattr("topkv_cli.group.entry_points", lambda group: [point])
    monkeypatch.setenv("TOPKV_BLOCK", "bench")
    reported = refused("bench")
    assert "TOPKV_BLOCK leaves that of topkv-more 9 out" in reported
    assert "pip install" not in reported


def test_what_is_not_here_is_not_listed(monkeypatch):
    monkeypatch.setattr("topkv_cli.group.entry_points", lambda group: [])
    lines = CliRunner().invoke(group.topkv, ["--help"]).stdout.splitlines()
    named = {line.split()[0] for line in lines if line.startswith("  ") and line.strip()}
    assert "doctor" in named
    assert not named & set(group.ELSEWHERE)
