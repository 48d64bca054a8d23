"""How commands end: exit status, one message, and what becomes of a stdout that takes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from topkv.errors import ConfigError
from topkv_cli.group import LazyGroup

CALL = (sys.executable, "-m", "topkv_cli")
FULL = Path("/dev/full")


def run(error):
    """The result of a command that raises ``error``."""
    group = LazyGroup("group")

    @group.command("fails")
    def fails():
        raise error

    group.get_command = lambda ctx, name: fails
    return CliRunner().invoke(group, ["fails"])


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("it is wrong", ["of a", "of b"]), 2, "it is wrong:\n  - of a\n  - of b\n"),
        (PermissionError(13, "Permission denied", "out"), 2, "Permission denied: 'out'\n"),
        (
            ZeroDivisionError("of a plugin"),
            1,
            "error: unexpected ZeroDivisionError: of a plugin\n",
        ),
    ],
)
def test_an_error_is_one_message_and_a_status(monkeypatch, error, status, text):
    monkeypatch.delenv("TOPKV_TRACEBACK", raising=False)
    error.add_note("while it was tested")
    done = run(error)
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert "  while it was tested\n" in done.stderr
    assert ("set TOPKV_TRACEBACK=1" in done.stderr) == (status == 1)


def test_a_traceback_is_to_be_had(monkeypatch):
    monkeypatch.setenv("TOPKV_TRACEBACK", "1")
    assert isinstance(run(ConfigError("it is wrong", [])).exception, ConfigError)


def test_what_click_refuses_stays_as_it_is():
    done = run(click.UsageError("not so"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error: not so" in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("args", [("plugins",), ("plugins", "--json"), ("--help",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_one_error(args, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as full:
        done = subprocess.run(
            [*CALL, *args], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    expected = "error: the output cannot be written: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize("args", [("plugins",), ("plugins", "--json"), ("--help",)])
def test_a_reader_that_has_gone_is_no_error(args):
    """As with other tools of Python: not a word, and status 1."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*CALL, *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_stdout_that_is_closed_is_refused_before_anything_runs():
    shell = ["sh", "-c", f"{sys.executable} -m topkv_cli plugins >&-"]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "error: stdout is closed" in done.stderr
