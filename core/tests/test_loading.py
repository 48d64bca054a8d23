"""While code of a package loads, stdout stays clean and an exit is a broken plugin."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from entry_points import FakePoint

from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.errors import PluginError
from topkv.plugins import PluginRegistry, registry
from topkv_cli import probes
from topkv_cli.doctor import libraries
from topkv_cli.group import topkv as command

LOUD = """
print("loading")
from topkv import hookimpl
from topkv.entries import PluginEntry

@hookimpl
def topkv_register_backends():
    print("registering")
    return [PluginEntry("loud", "backend", "loud_made:Made", doctor="loud_made:describe")]
"""
MADE = """
print("importing")

def Made(setup):
    print("building")

def describe():
    print("describing")
    return ["library: ok"]
"""


@pytest.fixture
def loud(tmp_path, monkeypatch):
    """A package whose modules print whenever they run."""
    (tmp_path / "loud_entry.py").write_text(LOUD)
    (tmp_path / "loud_made.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    points = [FakePoint("loud", "loud_entry", "topkv")]
    monkeypatch.setattr("topkv.plugins.records.entry_points", lambda group: points)
    registry.cache_clear()
    yield
    registry.cache_clear()
    for name in ("loud_entry", "loud_made"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("name", ["plugins", "doctor"])
def test_json_is_alone_on_stdout_whatever_a_plugin_prints(name):
    done = CliRunner().invoke(command, [name, "--json"])
    assert json.loads(done.stdout)
    assert "loading" in done.stderr
    assert "registering" in done.stderr


@pytest.mark.usefixtures("loud")
def test_a_factory_that_prints_leaves_stdout_alone(capsys):
    found = PluginRegistry()
    with pytest.raises(PluginError, match="does not keep the contract"):
        found.create("backend", "loud", None)
    assert libraries(found.get("backend", "loud")) == ["library: ok"]
    reported = capsys.readouterr()
    assert reported.out == ""
    for text in ("loading", "registering", "importing", "building", "describing"):
        assert text in reported.err


def leave(*args):
    raise SystemExit("bye")


def interrupt(*args):
    raise KeyboardInterrupt


class Leaving:
    """A plugin that exits when it is looked at."""

    def __dir__(self):
        raise SystemExit("bye")


def offer(**values):
    entry = PluginEntry("odd", "observer", f"{__name__}:leave", **values)
    return SimpleNamespace(topkv_register_observers=hookimpl(lambda: [entry]))


def test_an_exit_is_a_broken_plugin(monkeypatch):
    found = PluginRegistry([("odd", "1", offer(doctor=f"{__name__}:leave"))])
    with pytest.raises(PluginError, match="SystemExit: bye"):
        found.create("observer", "odd", None)
    monkeypatch.setattr("topkv_cli.doctor.registry", lambda: found)
    done = CliRunner().invoke(command, ["doctor", "--json"])
    assert json.loads(done.stdout)["plugins"]["observer odd"] == {"problem": "SystemExit: bye"}
    (looked,) = (r for r in PluginRegistry([("l", "1", Leaving())]).records() if r.problem)
    assert "SystemExit: bye" in looked.problem
    assert probes.attempt(leave) == {"problem": "SystemExit: bye"}


def test_an_interrupt_is_the_users(monkeypatch):
    class Point(FakePoint):
        load = interrupt

    monkeypatch.setattr(
        "topkv.plugins.records.entry_points", lambda group: [Point("a", "b", "topkv")]
    )
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry()
    stopped = PluginEntry("odd", "observer", f"{__name__}:interrupt")
    plugin = SimpleNamespace(topkv_register_observers=hookimpl(lambda: [stopped]))
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry([("odd", "1", plugin)]).create("observer", "odd", None)
    broken = SimpleNamespace(topkv_register_observers=hookimpl(lambda: interrupt()))
    with pytest.raises(KeyboardInterrupt):
        PluginRegistry([("odd", "1", broken)])
