"""The recipe of the shipped checkpoint, at sizes of seconds."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from topkv_evaluation.retrieval import make_prompt, standard_library_text

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"
MODULES = ("batches", "model", "schedule", "scores")


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    sys.path.insert(0, str(TRAINING))
    try:
        parts = {name: import_module(f"retrieval_{name}") for name in MODULES}
        parts["script"] = import_module("train_retrieval")
        parts["card"] = import_module("model_card")
    finally:
        sys.path.remove(str(TRAINING))
    return SimpleNamespace(**parts)


@pytest.fixture(scope="module")
def checkpoint(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    recipe.script.main(["--tiny", "--minutes", "0.05", "--device", "cpu", "--out", str(folder)])
    return folder


def test_checkpoint_loads_offline_and_generates(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    assert model.dtype == torch.bfloat16
    document = make_prompt(600, 2, seed=0, sinks=16)
    inputs = tokenizer(document.text, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [document.tokens.tolist()]
    output = model.generate(**inputs, max_new_tokens=5)
    assert output.shape == (1, 605)
    assert model.generation_config.eos_token_id is None
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0


def test_record_and_card_hold_the_scores(checkpoint: Path, recipe: SimpleNamespace) -> None:
    record = json.loads((checkpoint / "training.json").read_text())
    assert record["curve"]
    assert record["steps"] == record["curve"][-1]["step"]
    assert [row["length"] for row in record["scores"]["many"]] == [192, 384]
    assert record["versions"]["torch"] == torch.__version__
    record["scores"]["prompts"][1]["exact"] = 0.123
    card = recipe.card.write_model_card(record)
    assert "12.3% (2 facts, 4 prompts)" in card
    assert str(checkpoint) not in card
    recipe.card.main(checkpoint)
    assert (checkpoint / "README.md").read_text().count("\n| 192 |") == 2


def test_model_has_the_size_it_is_said_to_have(recipe: SimpleNamespace) -> None:
    with torch.device("meta"):
        model = recipe.model.LlamaForCausalLM(recipe.model.retrieval_config(32768))
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_573_888
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 500000.0


def test_forward_equals_the_models_own(checkpoint: Path, recipe: SimpleNamespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True).float()
    tokens = torch.randint(0, 256, (2, 33))
    ours, theirs = recipe.model.causal_logits(model, tokens), model(tokens).logits
    assert torch.equal(ours, theirs)


def test_batches_plant_each_question_after_its_fact(recipe: SimpleNamespace) -> None:
    maker = recipe.batches.BatchMaker(standard_library_text("train"), torch.device("cpu"), 0)

    @settings(deadline=None, max_examples=25)
    @given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 400))
    def check(rows: int, pairs: int, spare: int) -> None:
        batch = maker(rows, 2 * pairs * 28 + spare, pairs)
        for row in range(rows):
            text = bytes(batch.tokens[row].tolist()).decode("ascii")
            digits = [text[a[0] : a[-1] + 1] for a in batch.answers[row].tolist()]
            keys = set()
            for places, value in zip(batch.answers[row].tolist(), digits, strict=True):
                key = text[places[0] - 8 : places[0] - 4]
                asked_at = text.index(f"\n# ask: key {key} is {value}.\n")
                assert asked_at + 20 == places[0]
                assert text.index(f"\n# fact: key {key} is {value}.\n") + 28 <= asked_at
                assert value.isdigit()
                assert len(value) == 5
                assert value[0] != "0"
                keys.add(key)
            assert len(keys) == pairs
            assert int((~batch.plain[row]).sum()) == pairs * (28 + 27)

    check()


def test_batch_refuses_what_does_not_fit(recipe: SimpleNamespace) -> None:
    maker = recipe.batches.BatchMaker(standard_library_text("train"), torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="at least 112 for 2 pairs"):
        maker(1, 100, 2)


def test_an_answer_is_exact_only_with_all_its_digits(recipe: SimpleNamespace) -> None:
    tokens = torch.arange(24).view(2, 12)
    answers = torch.tensor([[[2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]]).expand(2, -1, -1)
    logits = torch.nn.functional.one_hot(tokens.roll(-1, 1), 256).float()
    assert recipe.scores.answer_hits(logits, tokens, answers).all()
    logits[1, 10] = 0
    hits = recipe.scores.answer_hits(logits, tokens, answers)
    assert hits.tolist() == [[True, True], [True, False]]


def test_the_loss_falls(recipe: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = recipe.model.LlamaForCausalLM(recipe.model.retrieval_config(256, tiny=True))
    maker = recipe.batches.BatchMaker(standard_library_text("train"), torch.device("cpu"), 0)
    optimizer = recipe.script.make_optimizer(model, 5e-3)
    reports = [
        recipe.script.step(model, optimizer, maker(8, 96), model.model.layers) for _ in range(80)
    ]
    text, answers, _ = torch.stack(reports).T
    assert abs(text[0] - torch.tensor(256.0).log()) < 0.2
    assert text[-5:].mean() < text[0] - 2
    assert answers[-5:].mean() < answers[0] - 2


def test_a_gradient_that_is_not_finite_spoils_nothing(recipe: SimpleNamespace) -> None:
    model = recipe.model.LlamaForCausalLM(recipe.model.retrieval_config(256, tiny=True))
    maker = recipe.batches.BatchMaker(standard_library_text("train"), torch.device("cpu"), 0)
    optimizer = recipe.script.make_optimizer(model, 1e-3)
    hook = model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    recipe.script.step(model, optimizer, maker(2, 96), model.model.layers)
    hook.remove()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["STANDARD", "LONG", "TINY"])
def test_schedule(recipe: SimpleNamespace, name: str) -> None:
    schedule = recipe.schedule.Schedule(getattr(recipe.schedule, name))
    fractions = [i / 1000 for i in range(1200)]
    visited = [schedule.stage(fraction).length for fraction in fractions]
    assert visited == sorted(visited)
    rates = [schedule.rate(fraction) for fraction in fractions]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == pytest.approx(schedule.peak)
    assert rates[-1] == pytest.approx(schedule.peak * schedule.floor)


def test_shares_that_do_not_add_up_are_refused(recipe: SimpleNamespace) -> None:
    stage = recipe.schedule.Stage(512, 2, 0.4)
    with pytest.raises(ValueError, match=r"add up to 1, got 0\.8"):
        recipe.schedule.Schedule((stage, stage))
