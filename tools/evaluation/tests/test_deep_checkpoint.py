"""The checkpoint of the mixture: its record, and its answers, through topkv too."""

from __future__ import annotations

import json
import lzma

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT, DEEP_CHECKPOINT

pytest.importorskip("topkv_quest.entry")
pytest.importorskip("topkv_triton_attention.entry")

MOST_BYTES = 8_000_000


def evaluated(*arguments):
    """Run the command and return its rows."""
    reported = map(str, ("eval", "--json", "--device", "cpu", "--impl", "reference", *arguments))
    result = CliRunner().invoke(topkv, [*reported], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["cells"]


def test_it_is_of_another_shape():
    first, deep = (json.loads((each / "config.json").read_text())
                   for each in (CHECKPOINT, DEEP_CHECKPOINT))  # fmt: skip
    assert deep["num_hidden_layers"] > first["num_hidden_layers"]
    assert deep["head_dim"] == 128 != first["head_dim"]
    assert deep["num_attention_heads"] == 4 * deep["num_key_value_heads"]
    weights = DEEP_CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size < MOST_BYTES
    with safe_open(weights, "pt") as opened:
        counts = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
    assert len(counts) == 9 * deep["num_hidden_layers"] + 2


def test_its_card_is_of_its_record():
    record = json.loads((DEEP_CHECKPOINT / "training.json").read_text())
    with lzma.open(DEEP_CHECKPOINT / "curve.jsonl.xz", "rt") as curve:
        lines = list(curve)
    assert json.loads(lines[-1])["step"] == record["steps"]
    card = (DEEP_CHECKPOINT / "README.md").read_text()
    assert f"{record['parameters'] / 1e6:.2f} million" in card
    for row in record["scores"]:
        assert row["task"] in card


@pytest.mark.nightly
def test_it_follows_variables_as_well_through_topkv():
    given = ("--tasks", "ruler:vt", "--contexts", 1792, "--questions", 2, "--budgets", "100%")
    given = (*given, "--dense-layers", "none", "--algorithms", "quest")
    dense, sparse = evaluated("--model", DEEP_CHECKPOINT, *given)
    assert dense["accuracy"] >= 0.75
    assert sparse["accuracy"] == dense["accuracy"]
    assert sparse["kl"] < 1e-4
