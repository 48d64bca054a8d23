"""``topkv eval`` on a model of somebody's own: tasks in words, runs that go on, the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from topkv_cli.group import topkv
from topkv_evaluation.eval import page, plot
from topkv_evaluation.eval.catalogue import Catalogue
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan
from topkv_evaluation.eval.results import RESULTS, read_rows
from topkv_evaluation.loading import load_model
from topkv_evaluation.tasks.needles import NOISE
from topkv_evaluation.tasks.words import haystack

pytestmark = pytest.mark.slow

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A newcomer's model: a random Qwen3 of two layers, a tokenizer of 600 tokens, a template."""
    target = tmp_path_factory.mktemp("models") / "qwen3-tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [NOISE, *haystack(20_000)],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    written = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    written.chat_template = CHAT
    written.save_pretrained(target)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        eos_token_id=0, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(target)
    return target


def call(folder, *args):
    common = ("--model", str(folder), "--device", "cpu", "--dense-layers", "none")
    return CliRunner().invoke(topkv, ["eval", *common, *map(str, args)])


SHORT = ("--contexts", "1024", "--questions", "2", "--budgets", "10%")


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory):
    """The newcomer's run."""
    out = tmp_path_factory.mktemp("out") / "report"
    tasks = "ruler:niah_single_1,text"
    done = call(folder, *SHORT, "--tasks", tasks, "--algorithms", "quest,exact", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "the report is" in done.stderr
    assert "ruler:niah_single_1, 1024 tokens" in done.stdout
    return out


class Page(HTMLParser):
    """Parser of tags, and of what they would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        links = [v for k, v in attrs if k in ("src", "href", "xlink:href") and v[:1] != "#"]
        self.loaded += links


@pytest.mark.nightly
def test_the_report_opens_offline(out):
    text = (out / page.REPORT).read_text(encoding="utf-8")
    found = Page(text)
    assert found.loaded == []
    assert not re.search(r"url\((?!#)|@import|<script|<link", text)
    assert (found.tags.count("h2"), found.tags.count("pre")) == (2, 3)  # and notes
    assert found.tags.count("svg") == (2 if find_spec("matplotlib") else 0)
    for row in read_rows(out):
        assert f"{row['device_bytes_per_token'] / 1024:.1f}" in text
        assert f"<h2>{row['task']}</h2>" in text
    assert "qwen3-tiny" in text


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib, of the extra plot")
def test_pictures_hold_what_was_measured(out):
    rows = [row for row in read_rows(out) if row["task"].startswith("text")]
    lines = {metric.name: plot.lines_of(rows, metric.name) for metric in plot.METRICS}
    assert not lines["accuracy"]  # nothing is asked about plain text
    assert {*lines["kl"]} == {"quest", "exact"}
    assert plot.svg(rows) == plot.svg(rows)
    assert plot.svg([row for row in rows if row["plugin"] is None]) == ""
    before = (out / page.REPORT).read_text(encoding="utf-8")
    (out / page.REPORT).unlink()
    page.main(out)
    assert (out / page.REPORT).read_text(encoding="utf-8") == before


def test_names_in_the_report_are_text(tmp_path, out):
    rows = [{**row, "algorithm": "<b>&x", "model": "<i>"} for row in read_rows(out)]
    page.write([*rows, {**rows[1], "refused": "<u>no"}], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert not {"b", "i", "u"} & {*Page(text).tags}
    assert "&lt;b&gt;&amp;x" in text
    assert "&lt;u&gt;no" in text


def test_a_run_goes_on_where_it_was_ended(folder, out, tmp_path, monkeypatch):
    lines = (out / RESULTS).read_text(encoding="utf-8").splitlines()
    again = tmp_path / "again"
    again.mkdir()
    # Of six cells four are there; the fifth was being written.
    (again / RESULTS).write_text("\n".join([*lines[:4], lines[4][:40]]), encoding="utf-8")
    ran = []
    from topkv_evaluation.eval import cells

    run = cells._run
    monkeypatch.setattr(cells, "_run", lambda cell, *a: ran.append(cell.label) or run(cell, *a))
    tasks = "ruler:niah_single_1,text"
    options = (*SHORT, "--tasks", tasks, "--algorithms", "quest,exact", "--out", again, "--json")
    done = call(folder, *options)
    assert done.exit_code == 0, done.stderr
    assert "4 of 6 cells are done already" in done.stderr
    assert ran == ["dense", "quest", "exact"]  # the first for its logits alone
    found = json.loads(done.stdout)["cells"]
    before = [json.loads(line) for line in lines]
    same = ("key", "kl", "accuracy", "device_bytes_per_token", "recall", "task", "algorithm")
    assert [[row[n] for n in same] for row in found] == [[row[n] for n in same] for row in before]
    assert found[:4] == before[:4]
    # Other settings are other cells, and those that were there stay.
    other = (*SHORT, "--seed", 1, "--tasks", "text", "--algorithms", "quest", "--out", again)
    more = call(folder, *other)
    assert more.exit_code == 0, more.stderr
    assert len(read_rows(again)) == 6 + 2
    (again / RESULTS).write_text("{\n" + lines[0] + "\n[]\n", encoding="utf-8")
    refused = call(folder, *options)
    assert refused.exit_code == 2
    assert refused.stderr.count("error: ") == 1
    assert "line 1 is no JSON" in refused.stderr
    assert "line 3: expected a row of topkv eval" in refused.stderr


def test_prompts_are_turns_of_the_chat_and_of_the_length(folder):
    options = Options(model=folder, contexts=(1024,), questions=2)
    catalogue = Catalogue(load_model(folder), options)
    (task,) = catalogue.tasks(["ruler:niah_single_1"])
    tokenizer = catalogue.prompts.tokenizer
    for question in task.questions:
        context = tokenizer.decode(task.contexts[question.context])
        asked = tokenizer.decode(question.tokens)
        assert context.startswith("<|user|>A special magic number is hidden within")
        assert asked.startswith("What is the special magic number for ")
        assert "provided text?<|end|><|assistant|> The special magic number for " in asked
        assert tokenizer.decode(question.reference) == f" {question.answers[0]}"
        total = len(task.contexts[question.context]) + len(question.tokens) + 128
        assert 900 < total <= 1024
    assert task.stop == {0}
    right = [*tokenizer(f" it is {task.questions[0].answers[0]}")["input_ids"]]
    assert task.score(task.questions[0], right) == 1
    assert task.score(task.questions[0], [0, *right]) == 0  # it has ended before
    plain = Catalogue(load_model(folder), replace(options, chat_template=False))
    (task,) = plain.tasks(["ruler:niah_single_1"])
    assert tokenizer.decode(task.contexts[0]).startswith("A special")


def test_files_are_asked(folder, tmp_path):
    file = tmp_path / "own.jsonl"
    line = {"context": "It is late. " * 40, "question": "Is it late?", "answers": ["yes", "late"]}
    file.write_text(json.dumps(line), encoding="utf-8")
    options = ("--tasks", file, "--algorithms", "quest", "--budgets", "50%", "--question", "dense")
    done = call(folder, *options, "--scoring", "f1", "--json")
    assert done.exit_code == 0, done.stderr
    dense, quest = json.loads(done.stdout)["cells"]
    assert (dense["task"], dense["question"], dense["questions"]) == ("own.jsonl", "dense", 1)
    assert "refused" not in quest
    assert (quest["kl"] is None) == (quest["forced_questions"] == 0)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [("ruler:niah", ["'ruler:niah': RULER has no such task", "niah_single_1", "qa_2"]),
     ("ruler:qa_1", ["name the file of SQuAD"]), ("absent", ["'absent': no such file"]),
     ("ruler:nope,absent", ["'ruler:nope'", "'absent'"]),
     ("", ["expected facts, text, texts, texts:KIND, ruler"]),
     ("facts", ["the model has 600"])],
)  # fmt: skip
def test_words_that_name_no_task(folder, tasks, words):
    done = call(folder, *SHORT, "--tasks", tasks)
    assert done.exit_code == 2
    assert done.stderr.count("error: ") == 1
    for word in words:
        assert word in done.stderr


def test_a_wrong_file_is_one_error(folder, tmp_path):
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"context": "a", "question": "b", "answer": ""}\nnone\n', encoding="utf-8")
    done = call(folder, "--tasks", file)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    for word in (str(file), "line 1: expected a text", "line 2 is no JSON"):
        assert word in done.stderr
    done = call(folder, "--tasks", file, "--contexts", "512")
    assert "exclude each other" in done.stderr


def test_snapkv_has_room_for_the_longest_answer_by_default(folder):
    found = {}
    for words, least in (("text", 64), ("ruler:niah_single_1", 128)):
        options = Options(model=folder, tasks=(words,), contexts=(1024,), questions=1)
        plan = Plan.of(options)
        snap = next(cell.choice for cell in plan.cells if "snapkv" in cell.label)
        found[words] = snap.params["generated"]
        assert found[words] >= least
        assert found[words] == max(cell.task.steps for cell in plan.cells)
    assert found["text"] < found["ruler:niah_single_1"]
    named = Plan.of(replace(options, algorithms=("snapkv:generated=7",)))
    assert named.cells[1].choice.params == {"generated": 7}
