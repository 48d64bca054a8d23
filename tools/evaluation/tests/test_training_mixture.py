"""The recipe of the mixture, at sizes of seconds: documents, plan, a run that is cut off."""

from __future__ import annotations

import json
import random
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from topkv_evaluation.retrieval import _in_part
from topkv_evaluation.tasks import needles, ruler, walk
from topkv_evaluation.tasks.near_keys import NearKeys
from topkv_evaluation.tasks.words import haystack

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"
CPU = torch.device("cpu")
ASKING = (
    "lookup",
    "dense_facts",
    "facts",
    "chains",
    "vt",
    "needles",
    "near_keys",
    "walk",
    "counted",
)


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    sys.path.insert(0, str(TRAINING))
    try:
        names = ("documents", "plan", "state", "scores", "card")
        parts = {name: import_module(f"mixture_{name}") for name in names}
        return SimpleNamespace(**parts, script=import_module("train_mixture"))
    finally:
        sys.path.remove(str(TRAINING))


# Documents.


def test_documents_have_their_length_and_ask(recipe: SimpleNamespace) -> None:
    @settings(deadline=None, max_examples=40)
    @given(
        st.sampled_from([*recipe.documents.MAKERS]),
        st.sampled_from([96, 160, 512, 2048, 4096, 16384]),
        st.integers(0, 999),
    )
    def check(kind: str, length: int, seed: int) -> None:
        text, marks = recipe.documents.document(kind, f"{seed}", length)
        assert len(text) == len(marks) == length
        assert {*marks} <= {0, 1}
        assert (text, marks) == recipe.documents.document(kind, f"{seed}", length)
        if kind in ASKING:
            assert any(marks)

    check()


def answers_of(text: bytes, marks: bytes) -> list[tuple[str, str]]:
    """Return the text before each answer, and the answer."""
    found, begin = [], None
    for place, mark in enumerate([*marks, 0]):
        if mark and begin is None:
            begin = place
        elif not mark and begin is not None:
            found.append((text[:begin].decode(), text[begin:place].decode()))
            begin = None
    return found


@pytest.mark.parametrize("kind", ["needles", "near_keys"])
def test_needles_are_answered_by_what_the_context_says(recipe: SimpleNamespace, kind: str) -> None:
    asked = 0
    for seed in range(30):
        for before, answer in answers_of(*recipe.documents.document(kind, f"{seed}", 3000)):
            question = before[before.rindex("\nWhat") :]
            context = before[: before.index("\nWhat")]
            for value in answer.split(", "):
                (line,) = [p for p in context.replace(". ", ".\n").split("\n") if value in p]
                key = line.rsplit(" for ", 1)[1].split(" is: ")[0]
                assert f"{key}" in question
                asked += 1
    assert asked >= 60


def test_chains_are_answered_by_their_assignments(recipe: SimpleNamespace) -> None:
    for kind, length in (("chains", 700), ("vt", 3000)):
        for seed in range(20):
            for before, answer in answers_of(*recipe.documents.document(kind, f"{seed}", length)):
                names = answer.split()
                asked = before.rstrip(" :").rsplit("value ", 1)[1].split(",")[0].split()[0]
                text = before[: before.rindex(asked)]
                holds = [f"VAR {names[0]} = {asked}"]
                holds += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
                assert all(line.strip() in text for line in holds)


def test_walks_are_answered_by_their_lines(recipe: SimpleNamespace) -> None:
    for seed in range(10):
        for before, answer in answers_of(*recipe.documents.document("walk", f"{seed}", 2500)):
            start = before.split()[-2]
            for after in answer.split(", "):
                assert walk.LINE.format(place=start, after=after) in before
                start = after


def test_questions_are_those_of_topkv_eval(recipe: SimpleNamespace) -> None:
    """Word by word but for the key, in a document as in the task's own prompt."""
    (template,) = needles.in_singular((needles.QUESTION + needles.PREFIX,))
    parts = template.format(kind="number", query="@").split("@")
    for kind, task in (("needles", ruler.MADE["niah_single_1"]), ("near_keys", NearKeys())):
        (sample,) = task(lambda s: len(s.prompt), 2000, 1, 0)
        texts = (recipe.documents.document(kind, f"{i}", 2000)[0].decode() for i in range(20))
        assert all(part in sample.question + sample.prefix for part in parts)
        assert any(all(part in text for part in parts) for text in texts)


def test_nothing_that_is_asked_by_is_trained_on(recipe: SimpleNamespace) -> None:
    assert not _in_part("pydoc_data/topics.py", "held_out")
    assert not {*recipe.documents.prose()} & {*haystack(20000)}


# The plan.


def test_a_batch_is_a_function_of_seed_and_step(recipe: SimpleNamespace) -> None:
    plan = recipe.plan.Plan(recipe.plan.TINY, 3)
    other = recipe.plan.Plan(recipe.plan.TINY, 4)
    for step in (0, 5, 6, plan.steps - 1):
        text, marks, kinds = recipe.plan.Batches(plan)[step]
        again = recipe.plan.Batches(plan)[step]
        assert all(torch.equal(a, b) for a, b in zip((text, marks, kinds), again, strict=True))
        assert not torch.equal(text, recipe.plan.Batches(other)[step][0])
        assert text.shape == (plan.stage(step).rows, plan.stage(step).length)
    with pytest.raises(IndexError):
        plan.stage(plan.steps)


def test_every_stage_has_the_tokens_it_is_said_to_have(recipe: SimpleNamespace) -> None:
    stages = recipe.plan.STANDARD
    assert {stage.length * stage.rows for stage in stages} == {131_072}
    assert [stage.length for stage in stages] == sorted(stage.length for stage in stages)
    assert all({*stage.weights} <= {*recipe.documents.MAKERS} for stage in stages)
    assert {*recipe.plan.WHOLE} >= {"vt", "needles", "near_keys", "walk", "facts"}
    assert recipe.plan.Plan(stages, 0).tokens == 131_072 * 15_600


def test_the_rate_rises_and_falls(recipe: SimpleNamespace) -> None:
    plan = recipe.plan.Plan(recipe.plan.STANDARD, 0)
    rates = [plan.rate(step) for step in range(0, plan.steps, 100)]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert plan.rate(plan.warmup) == plan.peak
    assert rates[-1] < 0.03 * plan.peak


@pytest.mark.parametrize(("shape", "count"), [("small", 4_394_240), ("deep", 3_836_032)])
def test_shapes(recipe: SimpleNamespace, shape: str, count: int) -> None:
    with torch.device("meta"):
        model = recipe.script.model_of(shape, 32768)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    if shape == "deep":
        assert 2 * count < 8_000_000
        assert (model.config.head_dim, model.config.num_hidden_layers) == (128, 8)
        assert model.config.num_attention_heads == 4 * model.config.num_key_value_heads


# A run.


def run_of(recipe: SimpleNamespace, folder: Path, seed: int = 0):
    return recipe.script.Training(recipe.plan.Plan(recipe.plan.TINY, seed), "tiny", folder, CPU)


def go(run, seconds: float = 1e9) -> None:
    run.go(seconds, run.model.model.layers, 0)


def everything(run) -> list[torch.Tensor]:
    state = run.optimizer.state_dict()["state"]
    moments = [value for each in state.values() for value in each.values()]
    return [*run.model.state_dict().values(), *moments]


@pytest.fixture(scope="module")
def whole(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("whole")
    run = run_of(recipe, folder)
    go(run)
    return run


def test_a_run_in_many_calls_is_the_same_to_the_bit(recipe, whole, tmp_path) -> None:
    for _ in range(whole.plan.steps):
        go(run_of(recipe, tmp_path), 0.0)
    last = run_of(recipe, tmp_path)
    assert last.step == whole.step == whole.plan.steps == 12
    pairs = [*zip(everything(last), everything(whole), strict=True)]
    assert len(pairs) > 40
    assert all(torch.equal(a, b) for a, b in pairs)
    assert recipe.state.read_curve(tmp_path) == recipe.state.read_curve(whole.folder)


def test_a_call_that_was_cut_off_makes_its_steps_again(recipe, whole, tmp_path) -> None:
    """Steps after the last save are lost, and their lines of the curve with them."""
    run = run_of(recipe, tmp_path)
    go(run, 0.0)
    lost = run_of(recipe, tmp_path)
    lost.save = lambda: None
    go(lost)
    assert recipe.state.read_curve(tmp_path)
    again = run_of(recipe, tmp_path)
    assert again.step == 1
    assert not recipe.state.read_curve(tmp_path)
    go(again)
    assert all(map(torch.equal, everything(again), everything(whole)))


def test_weights_alone_go_on_with_a_ramp(recipe, whole, tmp_path) -> None:
    go(run_of(recipe, tmp_path), 0.0)
    exact = run_of(recipe, tmp_path)
    (tmp_path / recipe.state.STATE).unlink()
    bare = run_of(recipe, tmp_path)
    assert bare.step == exact.step == 1
    assert bare.ramp == recipe.script.RAMP_STEPS
    assert bare.rate() == pytest.approx(exact.rate() / recipe.script.RAMP_STEPS)
    assert all(map(torch.equal, bare.model.parameters(), exact.model.parameters()))
    go(bare, 0.0)
    assert run_of(recipe, tmp_path).rate() > bare.rate() / 2, "the ramp goes on"


def test_parts_of_weights_hold_a_limit_and_belong_together(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recipe.state, "PART_BYTES", 40_000)
    go(run_of(recipe, tmp_path), 0.0)
    (tmp_path / recipe.state.STATE).unlink()
    parts = sorted(tmp_path.glob("weights-*"))
    assert len(parts) > 2
    assert all(path.stat().st_size < 45_000 for path in parts)
    assert run_of(recipe, tmp_path).step == 1
    parts[1].unlink()
    with pytest.raises(ValueError, match="bring all of one call"):
        run_of(recipe, tmp_path)


def test_another_plan_is_refused(recipe, whole) -> None:
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_of(recipe, whole.folder, seed=1)


def test_a_run_begins_from_a_checkpoint_of_its_shape(recipe, whole, tmp_path) -> None:
    kept = tmp_path / "kept"
    recipe.script.save_checkpoint(whole.model, kept)
    plan = recipe.plan.Plan(recipe.plan.TINY, 1)
    run = recipe.script.Training(plan, "tiny", tmp_path / "run", CPU, kept)
    pairs = zip(run.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(a, b.bfloat16().float()) for a, b in pairs)
    go(run, 0.0)
    assert recipe.script.Training(plan, "tiny", tmp_path / "run", CPU, kept).step == 1
    with pytest.raises(ValueError, match="holds a run of other settings"):
        recipe.script.Training(plan, "tiny", tmp_path / "run", CPU)
    with pytest.raises(ValueError, match=r"is a model of .*'hidden_size': 32.*, not of"):
        recipe.script.Training(plan, "small", tmp_path / "other", CPU, kept)


def test_the_loss_falls(recipe, tmp_path) -> None:
    stage = recipe.plan.Stage(96, 8, 60, {"lookup": 1, "chains": 1})
    plan = recipe.plan.Plan((stage,), 0, peak=5e-3, warmup=5)
    run = recipe.script.Training(plan, "tiny", tmp_path, CPU)
    batches = recipe.plan.Batches(plan)
    layers = run.model.model.layers
    before = recipe.script.losses(run.model, batches[0], layers)[1]
    go(run)
    after = recipe.script.losses(run.model, batches[0], layers)[1]
    assert after[0] < before[0] - 1.5
    assert after[1] < before[1] - 1.5


def test_each_document_counts_alike(recipe) -> None:
    """The loss of answers by hand, one document with many, one with few and one without."""
    torch.manual_seed(0)
    model = recipe.script.model_of("tiny", 64)
    text = torch.randint(0, 256, (3, 20), dtype=torch.uint8)
    marks = torch.zeros(3, 20, dtype=torch.bool)
    marks[0, 5:15], marks[1, 7] = True, True
    batch = (text, marks, torch.tensor([0, 1, 1]))
    loss, report = recipe.script.losses(model, batch, model.model.layers)
    each = model(text.long()).logits[:, :-1].log_softmax(-1)
    each = -each.gather(2, text.long()[:, 1:, None])[..., 0]
    wanted = (each[0, 4:14].mean() + each[1, 6]) / 2
    torch.testing.assert_close(report[1], wanted.detach())
    torch.testing.assert_close(loss, each.mean() + wanted)
    shares = dict(zip(recipe.script.REPORT, report.tolist(), strict=True))
    assert shares[recipe.plan.KINDS[0]] == shares[recipe.plan.KINDS[1]] == 1


def test_a_finished_run_is_a_checkpoint_with_its_card(recipe, tmp_path) -> None:
    words = ["--shape", "tiny", "--stages", "tiny", "--device", "cpu", "--out", str(tmp_path),
             "--score-tasks", "facts", "--lengths", "600", "--questions", "2"]  # fmt: skip
    recipe.script.main(words)
    target = tmp_path / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(target, local_files_only=True)("a")["input_ids"] == [97]
    record = json.loads((target / "training.json").read_text())
    assert record["steps"] == 12
    record["scores"][0]["right"] = 0.375
    card = recipe.card.write_card(record)
    assert "| facts | 37.5% |" in card
    assert str(tmp_path) not in card
    assert "weights drawn with a deviation of 0.02;" in card
    recipe.script.main(words)
    assert json.loads((target / "training.json").read_text())["steps"] == 12


def test_scores_are_those_of_generation(recipe) -> None:
    """Prompts of several lengths are padded: each answer is the one that it gets alone."""
    torch.manual_seed(0)
    model = recipe.script.model_of("tiny", 512).eval()
    rng = random.Random(0)
    question = recipe.scores.Question
    contexts = tuple(tuple(rng.choices(range(1, 256), k=n)) for n in (40, 33, 50))
    asked = tuple(question(i, (5, 6), 4, ("x",)) for i in range(3))
    task = recipe.scores.Task("t", contexts, asked, lambda tokens: "")
    together = recipe.scores._generated(model, task, asked)
    for context, row in zip(contexts, together, strict=True):
        alone = torch.tensor([[*context, 5, 6]])
        found = model.generate(alone, max_new_tokens=4, do_sample=False)
        assert found[0, -4:].tolist() == row
