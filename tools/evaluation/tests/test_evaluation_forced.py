"""Logits beside those of dense attention, intervals over contexts, and bytes of a token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from topkv import attach, hookimpl
from topkv.entries import PluginEntry
from topkv.plugins import PluginRegistry, registry
from topkv.plugins.records import installed
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.demo import load_checkpoint
from topkv_evaluation.eval import choices, tasks
from topkv_evaluation.eval.cells import Cell, Grid, config_of, run_cells
from topkv_evaluation.eval.forced import Forced, compare
from topkv_evaluation.eval.intervals import bootstrap
from topkv_evaluation.eval.runs import Run
from topkv_evaluation.tasks.prompts import Prompts
from topkv_evaluation.window import Window

pytestmark = pytest.mark.slow

DIM, LAYERS, HEADS = 64, 6, 2
GRID = {"backend": "triton_attention", "impl": None, "batch": 32, "forced": 32}


class Shuffled(Window):
    """Selects closed units at random, whatever the query asks."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        closed = (layer.step.lengths - 1).clamp(min=0) // self.group.unit
        closed = closed.repeat_interleave(self.group.lane_heads)
        generator = torch.Generator().manual_seed(layer.layer)
        for row, count in zip(out.ids, closed.tolist(), strict=True):
            drawn = torch.randperm(count, generator=generator)[: len(row)]
            row.fill_(-1)
            row[: len(drawn)] = drawn.to(row)
        return out


def with_shuffled():
    entry = PluginEntry("shuffled", "algorithm", f"{__name__}:Shuffled", hook_api=(3, 0))
    offer = type(
        "Offer", (), {"topkv_register_algorithms": staticmethod(hookimpl(lambda: [entry]))}
    )
    return PluginRegistry([*installed(), ("topkv-shuffled", "1", offer)])


@pytest.fixture(scope="module")
def model():
    return load_checkpoint("cpu").float()


@pytest.fixture(scope="module")
def prompts():
    return Prompts.of(AutoTokenizer.from_pretrained(CHECKPOINT))


def choice(text):
    return choices.read_algorithms([text], DIM, registry())[0]


def measure(model, task, *cells, dense=()):
    """Return rows of the baseline and of algorithms with their shares."""
    made = [Cell(task, None, 1.0, tuple(range(LAYERS)))]
    made += [Cell(task, choice(text), share, tuple(dense)) for text, share in cells]
    return [*run_cells(made, Grid(model, **GRID), lambda cell: None)]


def test_everything_equals_dense_and_a_shuffled_selection_is_far_off(model):
    task = tasks.retrieval_task(768, questions=4, per_context=2, seed=3)
    dense, exact = measure(model, task, ("exact", 1.0))
    assert exact["kl"] == pytest.approx(0, abs=1e-7)
    assert exact["kl_low"] == pytest.approx(0, abs=1e-7)
    assert exact["nll_change"] == pytest.approx(0, abs=1e-4)
    assert exact["nll"] == pytest.approx(dense["nll"], abs=1e-4)
    assert (exact["agreement"], exact["agreement_low"], exact["forced_questions"]) == (1, 1, 4)
    assert (exact["correct"], exact["recall"]) == (dense["correct"], pytest.approx(1, abs=1e-6))
    forced = Forced.of(task, 4)
    config = config_of(Cell(task, None, 1.0, tuple(range(LAYERS))), Grid(model, **GRID))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        Run(handle, task, 768, 32, forced).all()
    config = config_of(Cell(task, choice("streaming_llm"), 0.1, ()), Grid(model, **GRID))
    settings = {**config.as_dict(), "algorithm": "shuffled", "params": {}}
    with (
        torch.inference_mode(),
        attach(model, settings, engine="transformers", registry=with_shuffled()) as handle,
    ):
        run = Run(handle, task, 80, 32, forced)
        run.all()
        shuffled = run.row()
    assert shuffled["kl"] > 1
    assert shuffled["nll_change"] > 1
    for name in ("kl", "nll_change"):
        first, second = shuffled[f"{name}_contexts"]
        assert first != second
        assert (first + second) / 2 == pytest.approx(shuffled[name])
    assert shuffled["agreement_high"] < 0.7
    assert shuffled["correct"] < dense["correct"] == 4
    assert shuffled["recall"] < 0.5 < exact["recall"]


def test_logits_are_those_of_the_stock_model(model):
    """Kept logits of dense attention, at every token of every reference."""
    task = tasks.retrieval_task(700, questions=3, per_context=2, seed=5)
    forced = Forced.of(task, 3)
    config = config_of(Cell(task, None, 1.0, tuple(range(LAYERS))), Grid(model, **GRID))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        run = Run(handle, task, 700, 32, forced)
        run.all()
    nll = []
    for question in task.questions:
        whole = torch.tensor([*task.contexts[question.context], *question.forced])[None]
        with torch.no_grad():
            logits = model(whole).logits[0, -len(question.targets) :]
        stock = logits.log_softmax(-1)
        torch.testing.assert_close(forced.dense[question], stock, atol=1e-3, rtol=0)
        nll.append(-stock.gather(-1, torch.tensor(question.targets)[:, None]).mean())
    assert run.row()["nll"] == pytest.approx(float(sum(nll)) / 3, abs=1e-4)
    assert [question.targets for question in task.questions] == [
        tuple(question.answers[0].encode()) for question in task.questions
    ]


def test_questions_that_are_read_with_their_context(model):
    """The first token of the answer is that of the prompt; the rest is decoded sparsely."""
    task = tasks.retrieval_task(768, questions=4, per_context=2, seed=3)
    read = task.with_questions_read()
    assert [len(context) for context in read.contexts] == [788] * 4
    assert [q.context for q in read.questions] == [0, 1, 2, 3]
    dense, exact, few = measure(model, read, ("exact", 1.0), ("streaming_llm", 0.1))
    assert dense["correct"] == exact["correct"] == 4
    assert exact["kl"] == pytest.approx(0, abs=1e-7)
    assert few["correct"] < 4
    assert few["kl"] > 0.1
    assert read.questions[0].targets == task.questions[0].targets[1:]
    for question in read.questions:
        whole = torch.tensor(read.contexts[question.context])[None]
        stock = model.generate(whole, do_sample=False, max_new_tokens=5)[0, -5:].tolist()
        assert task.decode(stock) == question.answers[0]


@pytest.mark.nightly
def test_logits_of_dense_are_made_where_its_row_is_there_already(model):
    task = tasks.retrieval_task(768, questions=4, per_context=2, seed=3)
    _, whole = measure(model, task, ("streaming_llm", 0.1))
    cell = Cell(task, choice("streaming_llm"), 0.1, ())
    (alone,) = run_cells([cell], Grid(model, **GRID), lambda cell: None)
    for name in ("kl", "kl_low", "nll_change", "agreement", "accuracy"):
        assert alone[name] == pytest.approx(whole[name], abs=1e-6)
    (none,) = run_cells([cell], replace(Grid(model, **GRID), forced=0), lambda cell: None)
    assert (none["kl"], none["forced_questions"]) == (None, 0)
    assert none["accuracy"] == whole["accuracy"]


def test_plain_text_is_compared_and_not_asked(model, prompts, monkeypatch):
    monkeypatch.setattr(tasks, "TEXT_TOKENS", 12)
    task = tasks.text_task(600, 3, prompts, seed=1)
    dense, exact, few = measure(model, task, ("exact", 1.0), ("streaming_llm", 0.1))
    assert (dense["accuracy"], dense["correct"], dense["questions"]) == (None, None, 3)
    assert abs(exact["kl"]) < 1e-7 < few["kl"]
    assert dense["nll"] > 0
    again = tasks.text_task(600, 3, prompts, seed=1)
    assert again.digest == task.digest != tasks.text_task(600, 3, prompts, seed=2).digest


@pytest.mark.nightly
def test_bytes_of_a_token(model):
    """Dense attention reads all of the cache, others a share, with or without an index."""
    task = tasks.retrieval_task(768, questions=4, seed=3)
    texts = (("streaming_llm", 0.1), ("exact", 0.1), ("streaming_llm:buffer=4096", 0.1))
    dense, window, exact, large = measure(model, task, *texts)
    row, length = 2 * HEADS * DIM * 4, 768 + 20
    assert dense["device_bytes_per_token"] == LAYERS * row * length
    assert dense["context_bytes"] == LAYERS * row * 768
    assert dense["link_bytes_per_token"] == 0
    # Closed units and the open one, of 16 tokens each, where the newest has 4.
    assert window["device_bytes_per_token"] == LAYERS * row * (80 - 12)
    index = exact["index_tokens"] * row
    assert exact["device_bytes_per_token"] == pytest.approx(LAYERS * (77 * row + index), rel=0.02)
    assert large["link_bytes_per_token"] == 0 < window["link_bytes_per_token"]
    assert exact["link_bytes_per_token"] > 0
    (half,) = measure(model, task, ("streaming_llm", 0.1), dense=(0, 1))[1:]
    expected = row * (2 * length + 4 * (80 - 12))
    assert half["device_bytes_per_token"] == expected


def test_comparisons_by_hand():
    dense = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).log()
    ours = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.2, 0.2]]).log() + 3
    found = compare(ours, dense, [0, 2])
    first = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.25)
    second = 0.1 * math.log(0.1 / 0.6) + 0.1 * math.log(0.1 / 0.2) + 0.8 * math.log(0.8 / 0.2)
    assert found.kl == pytest.approx((first + second) / 2, abs=1e-6)
    assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.2)) / 2, abs=1e-6)
    assert found.nll_change == pytest.approx(
        found.nll + (math.log(0.7) + math.log(0.8)) / 2, abs=1e-6
    )
    assert found.agreement == 0.5


def test_intervals_are_over_contexts():
    alike = [(context, float(context)) for context in range(20) for _ in range(50)]
    apart = [(index, value) for index, (_, value) in enumerate(alike)]
    (low, high), (closer, near) = bootstrap(alike), bootstrap(apart)
    assert low < closer < 9.5 < near < high
    # The standard error of a mean of 20, by the normal approximation.
    error = 1.96 * math.sqrt(sum((x - 9.5) ** 2 for x in range(20)) / 20 / 20)
    assert (low, high) == pytest.approx((9.5 - error, 9.5 + error), abs=0.4)
    assert bootstrap(alike) == (low, high)
    assert bootstrap([]) is bootstrap([(3, 1.0), (3, 2.0)]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e3, 1e3)), min_size=1, max_size=30))
def test_an_interval_is_within_its_contexts(values):
    found = bootstrap(values)
    means = [
        sum(v for c, v in values if c == context) / sum(c == context for c, _ in values)
        for context in {c for c, _ in values}
    ]
    if len(means) < 2:
        assert found is None
    else:
        low, high = found
        assert min(means) - 1e-6 <= low <= high <= max(means) + 1e-6


@given(st.integers(0, 40), st.integers(1, 40))
def test_forced_questions_are_spread(most, count):
    asked = [tasks.Question(i, (i,), 1, ("a",), (7,)) for i in range(count)]
    task = tasks.Task("t", tuple((i,) for i in range(count)), tuple(asked), str)
    forced = Forced.of(task, most)
    assert len(forced.questions) <= most
    assert (len(forced.questions) > 0) == (most > 0)
    if forced.questions:
        assert forced.questions[0].context == 0
        assert forced.questions[-1].context >= count // 2 or len(forced.questions) == 1
