"""The script that runs kvpress's presses: its own loop beside topkv's, with a press that it makes.

kvpress itself is pinned to another Transformers and is not there; its stand-in here keeps the
tokens that a test names, so that rows can be compared with figures by hand.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from topkv_evaluation.demo import load_checkpoint
from topkv_evaluation.eval.cells import Cell, Grid, run_cells
from topkv_evaluation.eval.choices import Choice
from topkv_evaluation.eval.forced import Forced
from topkv_evaluation.eval.results import read_rows
from topkv_evaluation.eval.tasks import retrieval_task

SCRIPT = "kvpress_rows"


@dataclass
class Window:
    """Keeps the newest tokens of the context, through the hooks that kvpress's presses use."""

    compression_ratio: float = 0.0

    @contextmanager
    def __call__(self, model):
        def keep(module, args, kwargs, output):
            assert kwargs["cache_position"][-1] + 1 == kwargs["hidden_states"].shape[1]
            cache = kwargs.get("cache") or kwargs["past_key_values"]  # as before Transformers 5.24
            layer = cache.layers[module.layer_idx]
            kept = int(layer.keys.shape[2] * (1 - self.compression_ratio))
            layer.keys, layer.values = (each[:, :, -kept:] for each in (layer.keys, layer.values))

        hooks = [
            layer.self_attn.register_forward_hook(keep, with_kwargs=True)
            for layer in model.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@pytest.fixture
def presses(monkeypatch):
    found = ModuleType("kvpress")
    found.StreamingLLMPress = Window
    monkeypatch.setitem(sys.modules, "kvpress", found)


@pytest.fixture(scope="module")
def model():
    return load_checkpoint("cpu").float()


def cell_of(task, share, dense=()):
    return Cell(task, Choice("kvpress streaming_llm", "streaming_llm", 1), share, dense)


def test_all_of_the_context_is_dense_attention(script, presses, model):
    """Answers, logits and bytes are those of topkv's own dense baseline."""
    task = retrieval_task(600, questions=2, per_context=1, seed=5)
    grid = Grid(model, "triton_attention", None, 4, 1, "m")
    (dense,) = run_cells([Cell(task, None, 1.0, tuple(range(6)))], grid, lambda cell: None)
    with torch.inference_mode():
        row = script.measure(cell_of(task, 1.0), grid, Forced.of(task, 1))
    for name in ("accuracy", "ci_low", "nll", "context_bytes", "device_bytes_per_token"):
        assert row[name] == pytest.approx(dense[name], rel=1e-4), name
    assert dense["accuracy"] == 1
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["agreement"] == 1


def test_what_a_press_throws_away_is_gone(script, presses, model):
    """A window of a fifth holds no fact, whatever is asked; and its bytes are that many fewer."""
    task = retrieval_task(600, questions=2, per_context=1, seed=5)
    grid = Grid(model, "triton_attention", None, 4, 1, "m")
    with torch.inference_mode():
        row = script.measure(cell_of(task, 0.2), grid, Forced.of(task, 1))
    assert row["accuracy"] == 0
    assert row["kl"] > 1
    asked = len(task.questions[0].tokens)
    assert row["device_bytes_per_token"] == (120 + asked) / 600 * row["context_bytes"]


def test_what_is_missing_is_reported_by_name(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert script.main(["--out", str(tmp_path)]) == 2
    assert "kvpress is not installed; pip install --no-deps kvpress" in capsys.readouterr().err


def test_rows_go_into_the_table_and_are_not_made_twice(script, presses, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda name: object())
    words = ["--contexts", "700", "--questions", "1", "--budgets", "20%", "--forced", "0",
             "--device", "cpu", "--out", str(tmp_path)]  # fmt: skip
    assert script.main(words) == 0
    rows = {row["algorithm"]: row for row in read_rows(tmp_path)}
    assert rows["kvpress snapkv"]["refused"] == "kvpress has no SnapKVPress"
    assert rows["kvpress quest"]["refused"] == "kvpress has no QuestPress"
    assert rows["kvpress streaming_llm"]["accuracy"] == 0
    assert (tmp_path / "report.html").read_text().count("kvpress streaming_llm") > 0
    assert script.main(words) == 0
    again = [row["algorithm"] for row in read_rows(tmp_path)]
    assert again.count("kvpress streaming_llm") == 1, "what was refused is tried again"
