"""The recipe of the small MiniMax-M3 with trained block indexes, at sizes of seconds."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

import topkv
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"
BLOCK, LENGTH = 8, 64


@pytest.fixture(scope="module")
def recipe() -> Any:
    precision = torch.get_float32_matmul_precision()
    sys.path.insert(0, str(TRAINING))
    try:
        names = ("gate_model", "train_gate", "train_mixture", "retrieval_model", "mixture_plan")
        yield SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(TRAINING))
        torch.set_float32_matmul_precision(precision)


def loud(model: Any) -> Any:
    """Weights far larger than initial ones, so that attention is sharp and layers matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture
def base(recipe: Any) -> Any:
    return loud(recipe.train_mixture.model_of("tiny-blocks", 256))


@pytest.fixture
def gated(recipe: Any, base: Any) -> Any:
    """A model with indexes: three blocks of eight tokens a row."""
    return recipe.gate_model.with_index(base, BLOCK, 3)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, 256, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def forward(recipe: Any, model: Any, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Any]:
    """Return logits, and the layers of the training that made them."""
    layers = [recipe.gate_model.GateLayer(layer, rows) for layer in model.model.layers]
    return recipe.retrieval_model.causal_logits(model, tokens, layers), layers


def test_the_model_without_index_is_the_one_of_transformers(recipe, base, tokens) -> None:
    expected = base(tokens).logits
    logits = recipe.retrieval_model.causal_logits(base, tokens)
    torch.testing.assert_close(logits, expected)
    dim = base.config.head_dim
    assert base.model.rotary_emb(expected, torch.arange(3)[None])[0].shape[-1] == dim // 2


def test_training_attends_to_everything(recipe, base, gated, tokens) -> None:
    rows = torch.arange(BLOCK, LENGTH)
    logits, (first, last) = forward(recipe, gated, tokens, rows)
    torch.testing.assert_close(logits, base(tokens).logits)
    assert first.report is None
    assert not logits.requires_grad
    assert last.report.requires_grad
    # The model itself no longer selects everything.
    assert (gated(tokens).logits - base(tokens).logits).abs().max() > 1e-3


def test_scores_select_what_the_index_of_transformers_selects(recipe, gated, tokens) -> None:
    """The module is the oracle: its blocks are the best of these scores and the row's own."""
    rows = torch.arange(LENGTH)
    attention, seen = gated.model.layers[1].self_attn, []
    attention.indexer.register_forward_hook(lambda *call: seen.append(call[2]))
    attention.register_forward_pre_hook(
        lambda module, inputs, given: seen.append(given), with_kwargs=True
    )
    gated(tokens)
    given, chosen = seen
    q, k = recipe.gate_model.project(
        attention.indexer, given["hidden_states"], given["position_embeddings"]
    )
    scores = recipe.gate_model.block_scores(q, k, rows, BLOCK)
    own = torch.arange(scores.shape[-1]) == (rows // BLOCK)[:, None]
    best = scores.masked_fill(own, float("inf")).topk(3, dim=-1)
    expected = best.indices.masked_fill(best.values == float("-inf"), -1)
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("heads", [1, 2])
def test_mass_is_that_of_attention(recipe, heads) -> None:
    """Each row by itself in float64."""
    torch.manual_seed(heads)
    q, k = torch.randn(2, 4, 24, 16), torch.randn(2, heads, 24, 16)
    rows = torch.tensor([8, 13, 23])
    mass = recipe.gate_model.block_mass(q, k, rows, 0.5, BLOCK)
    for b in range(2):
        for lane in range(heads):
            for at, row in enumerate(rows.tolist()):
                shares = torch.zeros(3, dtype=torch.float64)
                group = range(lane * 4 // heads, (lane + 1) * 4 // heads)
                for head in group:
                    logits = k[b, lane, : row + 1].double() @ q[b, head, row].double() * 0.5
                    for token, share in enumerate(logits.softmax(-1)):
                        shares[token // BLOCK] += share / len(group)
                torch.testing.assert_close(mass[b, lane, at].double(), shares)


def test_the_loss_is_the_divergence_of_the_blocks_before(recipe) -> None:
    loss_of = recipe.gate_model.gate_loss

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 10_000), st.lists(st.integers(BLOCK, 5 * BLOCK - 1), min_size=1))
    def check(seed: int, places: list[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        mass = torch.rand((2, 2, len(places), 5), generator=generator)
        scores = torch.randn(mass.shape, generator=generator, requires_grad=True)
        rows = torch.tensor(places)
        loss = loss_of(mass, scores, rows, BLOCK)
        total = 0.0
        for at, place in enumerate(places):
            before = place // BLOCK
            target, some = mass[:, :, at, :before].double(), scores[:, :, at, :before].double()
            weight = target.sum(-1, keepdim=True)
            share = target / weight
            total += (weight * share * (share.log() - some.log_softmax(-1))).sum(-1).mean()
        torch.testing.assert_close(loss.double(), total / len(places))
        (grad,) = torch.autograd.grad(loss, scores)
        assert grad.isfinite().all()
        right = mass.log().detach().requires_grad_()
        assert loss_of(mass, right, rows, BLOCK).abs() < 1e-6

    check()


def test_what_is_held_is_at_most_what_the_best_hold(recipe) -> None:
    torch.manual_seed(0)
    mass, scores = torch.rand(1, 2, 3, 6), torch.randn(1, 2, 3, 6)
    rows = torch.tensor([8, 20, 47])
    held, best = recipe.gate_model.mass_held(mass, scores, rows, BLOCK, 2)
    assert held <= best
    torch.testing.assert_close(recipe.gate_model.mass_held(mass, mass, rows, BLOCK, 2)[0], best)
    total = 0.0
    for lane in range(2):
        for at, row in enumerate(rows.tolist()):
            own = row // BLOCK
            others = [u for u in range(6) if u != own]
            picked = max(others, key=lambda u: scores[0, lane, at, u])
            total += (mass[0, lane, at, own] + mass[0, lane, at, picked]) / 6
    torch.testing.assert_close(held, total)


def test_only_the_indexes_learn_and_they_do(recipe, gated, tokens) -> None:
    rows = torch.arange(BLOCK, LENGTH)
    before = {name: value.clone() for name, value in gated.state_dict().items()}
    learning = [p for p in gated.parameters() if p.requires_grad]
    optimizer = recipe.train_gate.adamw(learning, 1e-2)
    reports = []
    for _ in range(60):
        report = forward(recipe, gated, tokens, rows)[1][1].report
        report[0].backward()
        recipe.train_gate.update(optimizer)
        reports.append(report.detach())
    changed = {n for n, value in gated.state_dict().items() if not torch.equal(value, before[n])}
    assert changed
    assert all(".indexer." in name for name in changed)
    assert reports[-1][0] < 0.7 * reports[0][0]
    assert reports[-1][1] > reports[0][1] + 0.02
    torch.testing.assert_close(reports[-1][2], reports[0][2])


def test_weights_of_another_model_are_refused(recipe, base) -> None:
    base.lm_head.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"weights of another model.*extra"):
        recipe.gate_model.with_index(base, BLOCK, 3)


@pytest.mark.slow
def test_a_run_leaves_a_model_that_selects_for_itself(recipe, tmp_path) -> None:
    recipe.train_mixture.main(
        ["--shape", "tiny-blocks", "--stages", "tiny", "--device", "cpu", "--score-tasks",
         "--out", str(tmp_path / "base")]
    )  # fmt: skip
    base = tmp_path / "base" / "checkpoint"
    assert "MiniMax-M3 without experts and indexes" in (base / "README.md").read_text()
    words = ["--base", str(base), "--out", str(tmp_path / "gate"), "--tiny", "--device", "cpu"]
    recipe.train_gate.main([*words, "--block", "16", "--blocks", "4"])
    record = json.loads((tmp_path / "gate" / "training.json").read_text())
    assert [row["step"] for row in record["curve"]] == [12]
    assert record["blocks"] == 4
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gate", dtype=torch.float32, local_files_only=True
    )
    assert model.config.layer_types == ["full_attention", "minimax_m3_sparse"]
    loud(model)
    plan = Plan.of(Options(model=tmp_path / "gate", contexts=(768,), questions=2))
    assert {"dense", "trained_gate", "quest", "exact"} <= {cell.label for cell in plan.cells}
    ids = torch.randint(1, 256, (1, 200), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    options = {"backend": "triton_attention", "max_tokens": 512, "max_requests": 1}
    with topkv.attach(model, options) as handle:
        group = handle.config.groups[1]
        assert (group.algorithm, group.shape.unit, group.budget) == ("trained_gate", 16, 64)
        ours = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, expected)
    assert len({*ours[0, 200:].tolist()}) > 3


def test_rows_have_a_block_before_them(recipe) -> None:
    rows = recipe.train_gate.some_rows(500, BLOCK, LENGTH, 0)
    assert rows.min() >= BLOCK
    assert rows.max() == LENGTH - 1
    assert torch.equal(rows, recipe.train_gate.some_rows(500, BLOCK, LENGTH, 0))
    assert not torch.equal(rows, recipe.train_gate.some_rows(500, BLOCK, LENGTH, 1))
