"""``topkv demo`` and ``topkv generate``, as a user calls them."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import GroupShape, LayerView, Selection, StepTensors
from topkv_cli.group import topkv
from topkv_evaluation.demo import CHECKPOINT
from topkv_evaluation.retrieval import make_prompt
from topkv_evaluation.stats_view import show_stats
from topkv_evaluation.window import Window

KEYS = """
    context_tokens expected dense_answer sparse_answer correct window_answer algorithm backend
    impl budget_tokens buffer_tokens unit dense_layers device_kv_bytes representation_bytes
    metadata_bytes host_kv_bytes full_kv_bytes loaded_bytes misses hit_rate steps_per_second
    seconds
"""
GENERATE_KEYS = """
    text prompt_tokens new_tokens steps_per_second algorithm backend impl budget_tokens
    buffer_tokens device_kv_bytes representation_bytes metadata_bytes host_kv_bytes
    loaded_bytes misses hit_rate
"""
SPARSE = ("--algorithm", "quest", "--backend", "triton_attention", "--device", "cpu")


def call(*args, stdin=None):
    return CliRunner().invoke(topkv, list(args), input=stdin)


def refused(result, *words):
    """Check exit status 2, one error on stderr, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.mark.nightly
def test_the_demo_keeps_what_it_promises():
    result = call("demo", "--json", "--stats", "--tokens", "8192", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert set(KEYS.split()) <= set(shown)
    assert shown["context_tokens"] == 8192
    assert shown["correct"] is True
    assert shown["dense_answer"] == shown["sparse_answer"] == shown["expected"]
    assert shown["window_answer"] != shown["expected"]
    assert shown["dense_layers"] == []
    assert shown["full_kv_bytes"] == 8192 * 6 * 2 * 2 * 64 * 2
    assert shown["device_kv_bytes"] == 6 * 2 * 2 * 64 * 2 * (1024 + 32)
    device = shown["device_kv_bytes"] + shown["representation_bytes"]
    assert device <= shown["full_kv_bytes"] / 4
    assert shown["host_kv_bytes"] >= shown["full_kv_bytes"]
    assert 0 < shown["hit_rate"] < 1
    assert shown["misses"] > 0
    assert shown["loaded_bytes"] == shown["misses"] * 2 * 16 * 64 * 2
    assert sum(layer["misses"] for layer in shown["stats"]["layers"]) == shown["misses"]
    assert shown["impl"] == "reference"
    assert shown["steps_per_second"] > 0


def test_the_demo_refuses_before_it_computes():
    refused(call("demo", "--json", "--budget", "0", "--device", "cpu"), "budget")
    refused(
        call("demo", "--json", "--budget", "13000", "--device", "cpu"), "no prompt can be made"
    )


def generate(*args, stdin=None, model=CHECKPOINT, prompt=("--prompt", "import os\n")):
    room = ("--max-new-tokens", "5")
    return call("generate", "--model", str(model), *SPARSE, *room, *prompt, *args, stdin=stdin)


@pytest.fixture(scope="module")
def question():
    return make_prompt(1500, facts=4, seed=3)


def test_generate_answers_through_a_small_buffer(question):
    sizes = ("--budget", "256", "--buffer", "256", "--impl", "reference", "--json")
    result = generate(*sizes, prompt=("--prompt-file", "-"), stdin=question.text)
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert set(GENERATE_KEYS.split()) <= set(shown)
    assert "stats" not in shown
    assert shown["text"] == question.expected
    assert (shown["prompt_tokens"], shown["new_tokens"]) == (1500, 5)
    assert (shown["budget_tokens"], shown["buffer_tokens"]) == (256, 256)
    assert shown["impl"] == "reference"
    assert shown["dense_layers"] == [0, 1]
    assert 0 < shown["hit_rate"] < 1
    assert shown["steps_per_second"] > 0


def test_stats_are_reported_where_they_are_asked_for(question):
    sizes = ("--budget", "256", "--buffer", "256", "--impl", "reference")
    reported = generate(*sizes, "--json", "--stats", prompt=("--prompt", question.text))
    assert reported.exit_code == 0, reported.stderr
    shown = json.loads(reported.stdout)
    stats = shown["stats"]
    assert [layer["layer"] for layer in stats["layers"]] == [2, 3, 4, 5]
    assert sum(layer["misses"] for layer in stats["layers"]) == shown["misses"] > 0
    assert sum(layer["loaded_bytes"] for layer in stats["layers"]) == shown["loaded_bytes"]
    assert (stats["used_slots"], stats["slots"]) == (1, 1)
    assert stats["pages"] >= stats["used_pages"] == -(-1505 // 64)
    text = generate(*sizes, "--stats", prompt=("--prompt", question.text))
    assert text.stdout.strip() == question.expected
    *table, held = text.stderr.splitlines()[-7:]
    assert held.startswith("host pages 24 of ")
    assert table[0].split() == ["layer", "hits", "misses", "hit", "rate", "loaded", "bytes"]
    assert [line.split()[0] for line in table[1:]] == ["2", "3", "4", "5", "all"]
    assert table[-1].split()[-1] == str(shown["loaded_bytes"])


@pytest.mark.parametrize(("stalls", "shown"), [((1.5, 0.25), "1.750"), ((None, None), None)])
def test_stalls_are_a_column_where_they_were_measured(stalls, shown):
    layers = [
        {"layer": n, "hits": 3, "misses": 1, "loaded_bytes": 64, "stall_ms": stall}
        for n, stall in enumerate(stalls)
    ]
    held = {"pages": 2, "used_pages": 1, "slots": 1, "used_slots": 1}
    text = io.StringIO()
    show_stats({"layers": layers, **held}, Console(file=text, width=99))
    head, *_, last, _ = text.getvalue().splitlines()
    assert head.split()[7:] == (["stall", "ms"] if shown else [])
    assert last.split() == ["all", "6", "2", "75.0%", "128", *([shown] if shown else [])]


def test_stalls_are_reported_where_the_observer_is_on(question, tmp_path):
    file = tmp_path / "sparse.json"
    file.write_text(json.dumps({"observers": ["stalls"]}), encoding="utf-8")
    sizes = ("--config", str(file), "--budget", "256", "--buffer", "256")
    reported = generate(*sizes, "--json", "--stats", prompt=("--prompt", question.text))
    assert reported.exit_code == 0, reported.stderr
    layers = json.loads(reported.stdout)["stats"]["layers"]
    assert [layer["stall_ms"] > 0 for layer in layers] == [layer["misses"] > 0 for layer in layers]


def test_generate_streams_text(question, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(question.text, encoding="utf-8")
    result = generate("--dtype", "float32", prompt=("--prompt-file", str(file)))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == question.expected
    assert "impl reference" in result.stderr
    assert "dtype float32" in result.stderr


def test_options_beat_the_file(tmp_path):
    file = tmp_path / "sparse.json"
    file.write_text(json.dumps({"unit": 8, "budget": 64, "dense_layers": [2]}), encoding="utf-8")
    result = generate("--config", str(file), "--budget", "96", "--json")
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert (shown["unit"], shown["budget_tokens"], shown["dense_layers"]) == (8, 96, [2])


def test_one_token_has_no_rate():
    result = generate("--max-new-tokens", "1", "--json")
    assert json.loads(result.stdout)["steps_per_second"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--algorithm", "quset"), ("unknown algorithm 'quset'", "quest")),
        (("--budget", "512", "--buffer", "128"), ("buffer must hold the selection",)),
        (("--budget", "0"), ("budget",)),
        (("--unit", "128"), ("unit must divide page_tokens",)),
        (("--unit", "128", "--budget", "0"), ("unit must divide page_tokens", "budget")),
        (("--impl", "cuda"), ("impl", "'reference'")),
        (("--device", "nowhere"), ("device 'nowhere' cannot be used",)),
        (("--max-new-tokens", "32768"), ("32768 positions",)),
        (("--config", "absent.json"), ("cannot be read",)),
    ],
)
def test_wrong_settings_are_refused(options, words):
    refused(generate(*options, "--json"), *words)


def test_a_missing_model_is_refused(tmp_path):
    refused(generate("--json", model=tmp_path / "absent"), "no such directory")
    refused(generate("--json", model=tmp_path), "no model can be loaded")


def test_an_unsupported_class_is_refused(tmp_path):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    refused(generate("--json", model=tmp_path), "GPT2LMHeadModel", "topkv_transformers.classes")


@pytest.mark.parametrize("prompt", [(), ("--prompt", "a", "--prompt-file", "-")])
def test_exactly_one_prompt(prompt):
    result = generate("--json", prompt=prompt, stdin="b")
    assert (result.exit_code, result.stdout) == (2, "")


def test_an_empty_prompt_is_refused():
    refused(generate("--json", prompt=("--prompt", "")), "prompt is empty")


def select(lengths, width=4, unit=4, heads=2):
    """Return rows of ids that the window selects, lane 0 of each request."""
    shape = GroupShape((0,), unit, heads, 1, 8, torch.float32, 64, 8, 64, width, width, 2)
    model = SimpleNamespace(num_heads=heads)
    slots = torch.arange(len(lengths), dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    step = StepTensors(slots, lengths, lengths, slots.clamp(max=0) + 1, slots, slots)
    step.page_table = torch.zeros(len(lengths), 64, dtype=torch.int32)
    empty, q = torch.empty(0), torch.zeros(len(lengths), 1, heads, 8)
    ids = torch.full((len(lengths) * heads, width), 99, dtype=torch.int32)
    window = Window(AlgorithmSetup(model, shape, None, torch.device("cpu"), None))
    window.retrieve_topk(LayerView(0, 0, shape, step, empty, empty), q, None, Selection(ids))
    assert torch.equal(ids[::heads], ids[1::heads])
    return [sorted(unit for unit in row if unit >= 0) for row in ids[::heads].tolist()]


def test_the_window_holds_sinks_and_the_newest():
    # The unit of the newest token is the tail, which the core appends.
    assert select([0, 1, 4, 5, 9, 17, 21]) == [
        [],
        [],
        [],
        [0],
        [0, 1],
        [0, 1, 2, 3],
        [0, 2, 3, 4],
    ]
    assert select([41], width=1) == [[0]]
