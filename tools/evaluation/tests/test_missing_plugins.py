"""Commands say which plugins are missing, before they load a model or make a task."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from topkv_cli.group import topkv as command

MODEL = ("--model", "no-such-folder")  # the loader would refuse that instead
PROMPT = ("--prompt", "a", *MODEL)


@pytest.fixture(autouse=True)
def extras(monkeypatch):
    """The metadata of the core, whatever version of it is installed."""
    needed = ['topkv-to-come>=0.1; extra == "all"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--algorithm", "to_come"),
        ("generate", "--algorithm", "to_come", *PROMPT),
        ("share", "--algorithm", "to_come", *MODEL),
        ("eval", "--algorithms", "quest,to_come:a=1", *MODEL),
        ("eval", "--backend", "to_come", *MODEL),
        ("eval", "--algorithms", "quest:stages=to_come", *MODEL),
    ],
)
def test_the_package_of_a_plugin_is_named_before_a_model_is_loaded(monkeypatch, words):
    monkeypatch.setattr("topkv_evaluation.demo.load_checkpoint", pytest.fail)
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert "'to_come'" in done.stderr
    assert "topkv-to-come does: pip install topkv-to-come" in done.stderr
    assert "no-such-folder" not in done.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--tasks", "nonsense"), "--tasks is refused"),
        (("--contexts", "many"), "expected numbers of 1 and more like 1,4,16"),
        (("--depths", "101"), "expected numbers of 0 and more and at most 100"),
        (("--budgets", "5"), "--budgets is refused"),
    ],
)
def test_wrong_words_are_refused_before_a_model_is_loaded(words, reported):
    done = CliRunner().invoke(command, ("eval", *words, *MODEL))
    assert done.exit_code == 2
    assert reported in done.stderr
