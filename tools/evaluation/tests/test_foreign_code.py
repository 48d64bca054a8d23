"""Directories that bring Python code: it runs if it is allowed by name, and nobody asks.

The code is real: importing it makes a file. Standard input says yes to whoever asks.
"""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()
print("advice of a stranger")

class ForeignConfig(LlamaConfig):
    model_type = "topkv_foreign"

class ForeignModel(LlamaForCausalLM):
    config_class = ForeignConfig

class ForeignTokenizer(PreTrainedTokenizerFast):
    pass
"""
MAPS = {
    "model": {
        "AutoConfig": "foreign.ForeignConfig",
        "AutoModelForCausalLM": "foreign.ForeignModel",
    },
    "tokenizer": {"AutoTokenizer": [None, "foreign.ForeignTokenizer"]},
}


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(params=list(MAPS))
def foreign(request, tmp_path, monkeypatch):
    """A directory whose model or tokenizer is code, and the file that the code makes."""
    # Transformers copies code that it runs here.
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "run")
    )
    folder, marker = tmp_path / "model", tmp_path / "it_ran"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    for file in CHECKPOINT.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    if request.param == "model":
        change(folder / "config.json", auto_map=MAPS["model"], model_type="topkv_foreign")
    else:
        config = folder / "tokenizer_config.json"
        change(config, auto_map=MAPS["tokenizer"], tokenizer_class="ForeignTokenizer")
    return folder, marker


def call(folder, name, *more):
    task = folder / "task.jsonl"
    line = {"context": "import os\n" * 8, "question": "import ", "answer": "os"}
    task.write_text(json.dumps(line))
    common = ("--model", str(folder), "--device", "cpu", "--json")
    options = {
        "generate": ("--prompt", "import os", "--max-new-tokens", "2", "--algorithm", "quest"),
        "eval": ("--task", str(task), "--algorithms", "quest", "--budgets", "100%"),
    }
    backend = ("--backend", "triton_attention")
    args = [name, *common, *options[name], *backend, *more]
    return CliRunner().invoke(topkv, args, input="y\ny\ny\n")


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_code_is_refused_and_nobody_asks(foreign, name):
    folder, marker = foreign
    result = call(folder, name)
    assert not marker.exists()
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert "--trust-remote-code" in result.stderr
    assert str(folder) in result.stderr
    assert "[y/N]" not in result.stderr


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_code_that_is_allowed_runs(foreign, name):
    folder, marker = foreign
    result = call(folder, name, "--trust-remote-code")
    assert result.exit_code == 0, result.stderr
    assert marker.exists()
    json.loads(result.stdout)
    assert "advice of a stranger" in result.stderr
