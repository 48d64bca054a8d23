"""``topkv serve``: options of the engine, settings of topkv, and which engine is started."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

from topkv.errors import CapabilityError, ConfigError, PluginError
from topkv_engines import serve as served
from topkv_engines.arguments import take_owned, twice_reasons

OWNED = {"max_requests": "rows", "page_tokens": "page"}


def engine_args(config, **arguments):
    """Arguments of an engine whose options are ``--rows``, ``--page`` and ``--more``."""
    settings = dict(config)
    ours = take_owned(settings, OWNED, arguments)
    if reasons := twice_reasons(ours, arguments):
        raise ConfigError("these arguments do not go together", reasons)
    return {**arguments, **ours, "more": {**arguments.get("more", {}), "topkv": settings}}


MISSING: list[str] = []
"""Reasons of ``ONE``; those of ``OTHER`` stay."""

ONE, OTHER = (
    served.Server(f"{name}.server", "--model", engine_args, (*OWNED.values(),), ("more",), reasons)
    for name, reasons in {"one": lambda: MISSING, "other": lambda: ["other: not here"]}.items()
)


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    """Packages with servers, by the name of the engine: ``offered("ONE", "OTHER")``."""

    def offer(*names):
        points = [EntryPoint(name.lower(), f"{__name__}:{name}", served.SERVERS) for name in names]
        monkeypatch.setattr(served, "entry_points", lambda group: points)

    MISSING.clear()
    offer("ONE")
    return offer


def dry(*words):
    """The command line that would be started."""
    done = CliRunner().invoke(served.serve, ["DIR", *words, "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_options_of_the_engine_keep_their_order():
    """One that topkv has a name of its own for is read, in both ways of writing it."""
    more = ["--port", "8000", "--rows=4", "-tp", "1", "--more", '{"a": 1}', "--flag"]
    line = ONE.command_line("DIR", {"budget": 256}, more)
    assert line[:5] == [sys.executable, "-m", "one.server", "--model", "DIR"]
    assert line[-5:] == ["--port", "8000", "-tp", "1", "--flag"]
    assert dict(zip(line[5:-5:2], line[6:-5:2], strict=True)) == {
        "--rows": "4",
        "--page": "64",
        "--more": json.dumps({"a": 1, "topkv": {"budget": 256}}),
    }


def test_options_that_contradict_settings_are_refused():
    with pytest.raises(ConfigError) as caught:
        ONE.command_line("DIR", {"max_requests": 3, "page_tokens": 32}, ["--rows", "4"])
    (reason,) = caught.value.reasons
    assert reason == "rows is 3 by the configuration of topkv and 4 by the arguments; say it once"
    with pytest.raises(ConfigError, match="--more must be a JSON object"):
        ONE.command_line("DIR", {}, ["--more", "1"])


def test_settings_come_from_a_file_pairs_and_options(tmp_path):
    (tmp_path / "topkv.json").write_text('{"algorithm": "quest", "unit": 8, "budget": 64}')
    line = dry("--settings", str(tmp_path / "topkv.json"), "--set", "unit=16", "--budget", "128")
    reported = json.loads(line[line.index("--more") + 1])["topkv"]
    assert reported == {"algorithm": "quest", "unit": 16, "budget": 128}


@pytest.mark.parametrize("pair", ["unit", "=16"])
def test_a_setting_that_is_no_pair_is_refused(pair):
    done = CliRunner().invoke(served.serve, ["DIR", "--set", pair])
    assert done.exit_code == 2
    assert "expected KEY=VALUE" in done.output


def test_the_engine_that_can_start_is_taken(offered):
    offered("ONE", "OTHER")
    assert dry()[2] == "one.server"
    assert dry("--engine", "other")[2] == "other.server"


def test_an_engine_is_asked_for_where_several_or_none_can_start(offered):
    offered("ONE", "OTHER")
    MISSING.append("one: not here")
    with pytest.raises(PluginError, match="one and other are installed; say --engine one"):
        dry()
    with pytest.raises(PluginError, match=r"no package brings the engine two; .* one, other"):
        dry("--engine", "two")
    offered()
    with pytest.raises(PluginError, match="no package with a server is installed; pip install"):
        dry()
    with pytest.raises(PluginError, match=r"no package brings the engine one$"):
        dry("--engine", "one")


def test_nothing_is_started_that_cannot_serve(offered):
    offered("OTHER")
    with pytest.raises(CapabilityError, match="other: not here"):
        CliRunner().invoke(served.serve, ["DIR"], catch_exceptions=False)


def test_the_command_becomes_the_server(monkeypatch):
    started = []
    monkeypatch.setattr(served.os, "execv", lambda path, line: started.append((path, line)))
    CliRunner().invoke(served.serve, ["DIR", "--port", "1"], catch_exceptions=False)
    ((path, line),) = started
    assert path == sys.executable
    assert line[2:5] == ["one.server", "--model", "DIR"]
