"""The command of the README serves as it is written, but for model, port and options of a CPU."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from plugins.vllm.tests.server import ready, stream_all
from tests.readme import block
from topkv_engines.serve import serve


def words(model):
    """The words of the command, with a model for MODEL."""
    (line,) = block("serve").splitlines()
    assert line.count("MODEL") == 1
    return shlex.split(line.replace("MODEL", str(model)))


def test_the_command_of_the_readme_starts_a_server():
    command, subcommand, *options = words("DIR")
    assert (command, subcommand) == ("topkv", "serve")
    result = CliRunner().invoke(serve, [*options, "--engine", "vllm", "--dry-run"])
    assert result.exit_code == 0, result.output
    line = json.loads(result.output)
    reported = json.loads(line[line.index("--additional-config") + 1])["topkv"]
    assert reported == {
        "algorithm": "quest",
        "backend": "triton_attention",
        "budget": 2048,
        "max_tokens": 262144,
    }
    assert line[line.index("--max-num-seqs") + 1] == "8"


@pytest.mark.nightly
def test_the_server_of_the_readme_answers(model, stock, prompt, tmp_path):
    """The budget covers the prompt, so tokens are those of stock vLLM."""
    more = ["--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
    asked = [prompt(97)]
    ((expected,),) = stock.answer(asked, 8)
    with ready([*words(model)[2:], *more], tmp_path / "log") as server:
        assert stream_all(server, asked, 8, [None]) == [expected]
