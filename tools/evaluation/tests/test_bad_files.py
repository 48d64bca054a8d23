"""Files that are no model, no tokenizer or no text: one error, exit status 2."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from click.testing import CliRunner

from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def scramble(folder):
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def tokenizer_syntax(folder):
    (folder / "tokenizer.json").write_text("{")


def tokenizer_content(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "None"}}')


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def other_shape(folder):
    change(folder, intermediate_size=40)


def more_layers(folder):
    change(folder, num_hidden_layers=7)


def no_object(folder):
    (folder / "config.json").write_text("[1]")


BAD = {
    truncate: ("no model can be loaded",),
    empty: ("no model can be loaded",),
    scramble: ("no model can be loaded",),
    tokenizer_syntax: ("no tokenizer can be loaded",),
    tokenizer_content: ("no tokenizer can be loaded",),
    other_shape: ("config.json", "mlp.gate_proj.weight: expected [40, ", "and 10 more"),
    more_layers: ("config.json", "model.layers.6.mlp.up_proj.weight", "missing", "and 1 more"),
    no_object: ("no model can be loaded",),
}


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(CHECKPOINT, target)
    return target


def refused(args, *words, stdin=None):
    done = CliRunner().invoke(topkv, list(map(str, args)), input=stdin)
    assert done.exit_code == 2, (done.exit_code, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    for word in (*words, "error: "):
        assert word in done.stderr, done.stderr
    for word in ("Traceback", "error: unexpected"):
        assert word not in done.stderr, done.stderr


COMMON = ("--device", "cpu", "--json", "--backend", "triton_attention")


@pytest.mark.parametrize("damage", BAD)
def test_a_damaged_directory_is_refused(folder, damage):
    damage(folder)
    args = ("generate", "--model", folder, *COMMON, "--algorithm", "quest", "--prompt", "a")
    refused(args, *BAD[damage], str(folder))
    task = folder / "task.jsonl"
    task.write_text('{"context": "import os", "question": "a", "answer": "b"}')
    args = ("eval", "--model", folder, *COMMON, "--task", task, "--algorithms", "quest")
    refused(args, *BAD[damage], str(folder))


LATIN = "é".encode("latin-1")
GENERATE = ("generate", "--model", CHECKPOINT, *COMMON, "--algorithm", "quest")


def test_a_prompt_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf" + LATIN)
    refused((*GENERATE, "--prompt-file", file), "prompt", "UTF-8", str(file))
    stdin = io.BytesIO(b"caf" + LATIN)
    refused((*GENERATE, "--prompt-file", "-"), "prompt", "UTF-8", stdin=stdin)
    # As Python decodes bytes of the command line that are no UTF-8.
    refused((*GENERATE, "--prompt", "caf\udce9"), "prompt", "UTF-8")
