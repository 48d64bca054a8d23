"""``topkv serve --engine sglang`` without SGLang: what it would start, and why it does not."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from topkv.errors import CapabilityError, ConfigError
from topkv_engines.serve import serve
from topkv_sglang.serve import SERVER

PAGE = Path(__file__).parents[3] / "docs" / "serve.md"


def values(words):
    """Values by option; JSON is decoded."""
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return {name: json.loads(each) if "{" in each else each for name, each in pairs.items()}


def test_the_command_line_of_the_page_is_what_the_command_writes():
    (shown,) = re.findall(r"\$ python (-m sglang.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    module, *words = shlex.split(shown.replace("\\\n", " "))[1:]
    shown = values(words)
    settings = shown["--json-model-override-args"]["topkv_settings"]
    line = SERVER.command_line("MODEL", settings, ["--max-running-requests", "8"])
    assert line[:3] == [sys.executable, "-m", module]
    assert values(line[3:]) == shown


def test_settings_stand_beside_overrides_of_the_user():
    more = ["--json-model-override-args", '{"mine": 1}', "--port", "1"]
    line = SERVER.command_line("DIR", {"budget": 64}, more)
    found = json.loads(line[line.index("--json-model-override-args") + 1])
    assert found == {"mine": 1, "topkv_settings": {"budget": 64}}
    assert line[-2:] == ["--port", "1"]
    with pytest.raises(ConfigError, match="json_model_override_args must be a JSON object"):
        SERVER.command_line("DIR", {}, ["--json-model-override-args", "[1]"])


def test_without_sglang_nothing_is_started(monkeypatch):
    monkeypatch.setattr("topkv_sglang.versions.installed", lambda: None)
    words = ["DIR", "--engine", "sglang"]
    with pytest.raises(CapabilityError, match=r"sglang: not installed; install sglang==0\.5\.23"):
        CliRunner().invoke(serve, words, catch_exceptions=False)
    monkeypatch.setattr("topkv_sglang.versions.installed", lambda: "0.5.22")
    with pytest.raises(CapabilityError, match=r"0\.5\.22 is not among the versions"):
        CliRunner().invoke(serve, words, catch_exceptions=False)
