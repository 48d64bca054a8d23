"""``topkv eval``: its cells beside loops that are written out, and the command itself."""

from __future__ import annotations

import json
import tomllib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from topkv import SparseCoordinator, attach
from topkv.plugins import registry
from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.demo import answer_question, load_checkpoint
from topkv_evaluation.eval import ALGORITHMS, choices, tasks
from topkv_evaluation.eval.cells import Cell, Grid, config_of, run_cells
from topkv_evaluation.eval.command import evaluate
from topkv_evaluation.eval.intervals import wilson
from topkv_evaluation.eval.results import RESULTS
from topkv_evaluation.eval.runs import Run
from topkv_evaluation.retrieval import ASK_BYTES, VALUE_DIGITS, make_prompt
from topkv_evaluation.tasks.files import read_file
from topkv_evaluation.tasks.prompts import Prompts
from topkv_testing.integrity import check_integrity

DIM, LAYERS = 64, 6
FAST = ("--device", "cpu", "--dense-layers", "none", "--contexts", "768", "--questions", "4")


@pytest.fixture(scope="module")
def model():
    # float32: the rounding of a batch differs from that of one row, and must not flip a digit.
    return load_checkpoint("cpu").float()


def choice(text):
    (found,) = choices.read_algorithms([text], DIM, registry())
    return found


def run(model, task, text, share, batch=32, dense=()):
    cell = Cell(task, choice(text) if text else None, share, tuple(dense))
    grid = Grid(model, "triton_attention", None, batch)
    config = config_of(cell, grid)
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        done = Run(handle, task, cell.budget, min(batch, len(task.questions)))
        done.all()
        check_integrity(handle.coordinator)
        return done, done.row() | {"unit": choice(text).unit if text else None}, config


@contextmanager
def logits_of_steps(model):
    """Record logits ``[B, V]`` of each forward of one column, which differ sooner than answers."""
    steps = []

    def keep(module, args, output):
        if args[0].shape[1] == 1:
            steps.append(output.logits[:, -1].clone())

    hook = model.register_forward_hook(keep)
    try:
        yield steps
    finally:
        hook.remove()


def test_what_is_not_installed_is_not_compared_unless_it_is_named():
    def found(*names):
        records = [SimpleNamespace(name=name) for name in names]
        return choices.installed(ALGORITHMS, SimpleNamespace(usable=lambda kind: records))

    assert found("quest", "other") == "quest"
    assert found("snapkv", "double_sparsity") == ("double_sparsity,snapkv:generated={steps},exact")
    assert found() == ALGORITHMS


# Cells beside loops that are written out.


def test_answers_equal_one_request_a_question(model):
    """Forks, batches and teacher forcing against a request of its own for every question."""
    task = tasks.retrieval_task(768, questions=4, per_context=2, seed=3)
    with logits_of_steps(model) as batched:
        done, row, config = run(model, task, "quest", 0.1, batch=3)
    alone, correct, rows = [], 0, []
    for index in range(2):
        document = make_prompt(768 + ASK_BYTES, facts=2, seed=3 + index)
        for question in task.questions[2 * index : 2 * index + 2]:
            asked = type(document)(
                torch.tensor([*task.contexts[index], *question.tokens]).byte().numpy(),
                document.facts, document.asked,
            )  # fmt: skip
            room = {"max_requests": 1, "max_tokens": 832, "max_request_tokens": 832}
            settings = {**config.as_dict(), **room}
            with (
                attach(model, settings, engine="transformers") as handle,
                logits_of_steps(model) as single,
            ):
                found = answer_question(model, handle.new_cache(), asked, lambda tokens: None)
            rows.append(torch.cat(single))
            alone.append(found.answer)
            correct += (found.answer,) == question.answers
    assert [bytes(answer).decode("latin-1") for answer in done.answers] == alone
    assert (row["correct"], row["questions"], row["accuracy"]) == (correct, 4, correct / 4)
    assert len(set(alone)) > 1
    first, second = torch.stack(batched[:24], 1), torch.stack(batched[24:], 1)
    torch.testing.assert_close(torch.cat([first, second]), torch.stack(rows), atol=1e-3, rtol=0)


def test_the_baseline_equals_generate_of_the_stock_model(model):
    task = tasks.retrieval_task(768, questions=3, seed=3)
    done, row, _ = run(model, task, None, 1.0, dense=range(LAYERS))
    for question, ours in zip(task.questions, done.answers, strict=True):
        prompt = torch.tensor([*task.contexts[0], *question.tokens])[None]
        stock = model.generate(prompt, do_sample=False, max_new_tokens=VALUE_DIGITS)
        assert ours == stock[0, prompt.shape[1] :].tolist()
    assert (row["correct"], row["recall"], row["hit_rate"]) == (3, None, None)
    assert row["with_index_percent"] == row["budget_percent"] == 100


def test_a_context_is_read_once(model, monkeypatch):
    begun = []
    begin = SparseCoordinator.forward_begin

    def counted(self, decode=(), prefill=(), append=None, queries=1):
        begun.append((len(decode), sum(tokens for _, tokens in prefill), append is None))
        begin(self, decode, prefill, append, queries)

    monkeypatch.setattr(SparseCoordinator, "forward_begin", counted)
    task = tasks.retrieval_task(700, questions=5, per_context=3, seed=1)
    run(model, task, "streaming_llm", 0.1, batch=3)
    assert sum(tokens for _, tokens, _ in begun) == 2 * 700
    steps = [rows for rows, tokens, appends in begun if rows and appends]
    assert steps == [2] * 24 + [3] * 24


def test_rows_of_other_lengths(model, tmp_path):
    """Contexts and questions of a file, each of another length, in one batch."""
    file, lines = tmp_path / "task.jsonl", []
    for tokens, lead in ((700, ""), (811, "\n# so"), (640, "")):
        document = make_prompt(tokens, facts=3, seed=tokens)
        context, question = document.text[:-ASK_BYTES], lead + document.text[-ASK_BYTES:]
        lines.append({"context": context, "question": question, "answer": document.expected})
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    prompts = Prompts.of(AutoTokenizer.from_pretrained(CHECKPOINT))
    task = tasks.sample_task(file.name, *read_file(file, 200), prompts, frozenset())
    assert [len(context) for context in task.contexts] == [680, 791, 620]
    with logits_of_steps(model) as steps:
        done, row, _ = run(model, task, None, 1.0, dense=range(LAYERS))
    assert row["correct"] == 3, done.answers
    for index, question in enumerate(task.questions):
        whole = torch.tensor([*task.contexts[index], *question.tokens])[None]
        with torch.no_grad():
            stock = model(whole, logits_to_keep=1).logits[0, -1]
        ours = steps[len(question.tokens) - 1][index]
        torch.testing.assert_close(ours, stock, atol=1e-3, rtol=0)
    # All of the context is all of the question as well.
    covered = run(model, task, "quest", 1.0)[1]
    assert covered["correct"] == 3
    assert (covered["recall"], covered["exact_recall"]) == pytest.approx((1, 1), abs=1e-6)


# Attention mass and index traffic.


@pytest.fixture(scope="module")
def measured(model):
    task = tasks.retrieval_task(768, questions=4, seed=3)
    texts = ("quest", "exact", "streaming_llm", "snapkv:generated=32,window=16")
    return {text.split(":")[0]: run(model, task, text, 0.1)[1] for text in texts}


def test_index_traffic_is_that_of_the_readmes(measured):
    length, kv = 768 + ASK_BYTES, 2 * 2 * DIM * 4
    found = {name: row["index_tokens"] for name, row in measured.items()}
    # bfloat16 bounds of a float32 model, two a unit and head; all channels of float32 keys, and
    # which ones they are; kept ids, their count, and the turn, but no queries.
    assert found["quest"] == pytest.approx(-(-length // 16) * 2 * 2 * DIM * 2 / kv, abs=1e-3)
    assert found["exact"] == pytest.approx((length * 2 * DIM * 4 + 2 * DIM * 4) / kv, abs=1e-3)
    assert found["streaming_llm"] == 0
    width = 77 - 1 - 32
    assert found["snapkv"] == pytest.approx((2 * width + 2 + 2) * 4 / kv, abs=1e-3)
    for row in measured.values():
        budget = 80 if row["unit"] == 16 else 77
        share = 100 * (budget + row["index_tokens"]) / 768
        assert row["with_index_percent"] == pytest.approx(share, abs=1e-3)


def test_no_selection_beats_the_best_one(measured):
    for row in measured.values():
        assert 0 < row["recall"] <= row["exact_recall"] + 1e-6 < 1
    exact = measured["exact"]
    assert exact["recall"] == pytest.approx(exact["exact_recall"], abs=0.02)
    assert exact["correct"] == 4
    assert measured["streaming_llm"]["correct"] == 0
    for row in measured.values():
        assert 0 < row["hit_rate"] < 1


def test_a_refused_cell_has_a_reason_and_the_next_one_runs(model):
    task = tasks.retrieval_task(768, questions=2, seed=3)
    grid = Grid(model, "triton_attention", None, 32)
    snap = choice("snapkv:generated=8,window=16")  # fewer places than steps
    cells = [Cell(task, choice("quest"), 0.01, ()), Cell(task, snap, 0.2, ()),
             Cell(task, choice("streaming_llm"), 0.1, ())]  # fmt: skip
    few, outgrown, ran = run_cells(cells, grid, lambda cell: None)
    assert "budget must be at least two units" in few["refused"]
    assert "have more than 8 tokens after" in outgrown["refused"]
    assert "refused" not in ran
    assert ran["questions"] == 2


# The command.


def call(*args):
    return CliRunner().invoke(topkv, ["eval", *args])


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "made"
    options = ("--algorithms", "quest,streaming_llm", "--budgets", "10%,1%", "--out", str(out))
    return call(*FAST, *options, "--json", "--stats"), out


def test_json_is_alone_on_stdout(shown):
    result, out = shown
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    cells = found["cells"]
    assert [(row["algorithm"], row["nominal_percent"]) for row in cells] == [
        ("dense", 100), ("quest", 10), ("quest", 1), ("streaming_llm", 10), ("streaming_llm", 1),
    ]  # fmt: skip
    assert ["refused" in row for row in cells] == [False, False, True, False, True]
    assert ["stats" in row for row in cells] == [True, True, False, True, False]
    layers = cells[1]["stats"]["layers"]
    assert len(layers) == cells[1]["sparse_layers"]
    assert sum(layer["misses"] for layer in layers) >= cells[1]["loaded_units"] > 0
    assert (cells[0]["correct"], cells[3]["correct"]) == (4, 0)
    assert (cells[1]["impl"], cells[1]["dtype"]) == ("reference", "bfloat16")
    low, high = wilson(cells[1]["correct"], 4)
    assert (cells[1]["ci_low"], cells[1]["ci_high"]) == (low, high)
    assert found["settings"]["contexts"] == [768]
    lines = (out / RESULTS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == cells


def test_the_table_names_cells_and_reasons(shown, capsys):
    from rich.console import Console

    from topkv_evaluation.eval.report import show

    result, _ = shown
    show(json.loads(result.stdout)["cells"], Console(width=40))
    text = capsys.readouterr().out
    assert "loaded bytes" in text
    for words in ("4/4 100.0%", "51.0% - 100.0%", "10.4%", "streaming_llm", "two units"):
        assert words in text, text


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--algorithms", "quset"), "unknown algorithm 'quset'"), (("--budgets", "5"), "shares"),
     (("--contexts", "65536"), "32768 positions"), (("--model", "absent"), "no such directory"),
     (("--tasks", "facts,absent.jsonl"), "no such file"), (("--backend", "no"), "unknown backend"),
     (("--budgets", "1%", "--algorithms", "quest"), "no cell of the comparison")],
)  # fmt: skip
def test_wrong_options_are_refused(options, word):
    result = call(*FAST, *options, "--json")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert word in result.stderr, result.stderr


def test_the_entry_point_is_the_command():
    project = Path(__file__).parents[1] / "pyproject.toml"
    points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    module, name = points["topkv.commands"]["eval"].split(":")
    assert (module, getattr(__import__(module, fromlist=[name]), name)) == (
        evaluate.callback.__module__, evaluate,
    )  # fmt: skip


@pytest.mark.gpu
def test_a_gpu_sees_what_its_steps_attend_to():
    """Replayed steps would show recall nothing."""
    given = ("--device", "cuda", "--contexts", "768", "--questions", "4", "--budgets", "20%",
             "--dense-layers", "0-1")  # fmt: skip
    done = CliRunner().invoke(topkv, ["eval", "--json", *given, "--algorithms", "quest,exact"])
    assert done.exit_code == 0, done.stderr
    quest, exact = json.loads(done.stdout)["cells"][1:]
    assert 0.3 < quest["recall"] <= exact["recall"] <= 1


def test_the_command_says_what_it_will_do_and_a_line_a_cell():
    """It says so before anything is computed, and without a terminal, as in a log or a pipe."""
    asked = ("--algorithms", "quest,snapkv:window=9", "--budgets", "5%", "--forced", "0")
    done = CliRunner().invoke(topkv, ["eval", *FAST, *asked])
    assert done.exit_code == 0, done.stderr
    lines = done.stderr.splitlines()
    announced, *cells = lines[lines.index("loading torch and the model ...") + 1 :]
    assert announced == (
        "cells: 3, of tasks: 1; questions in all: 12; contexts to read: 1, of up to 768 tokens, "
        "once for all cells that can share them"
    )
    dense, quest, snapkv = cells
    assert dense.startswith("1/3 facts in 768 bytes of source code: dense 100%: ")
    assert " of 4 right; " in dense
    assert " left" in dense
    assert quest.startswith("2/3 facts in 768 bytes of source code: quest 5%: ")
    assert ": refused: " in snapkv
    assert snapkv.endswith("about 0:00 left")
