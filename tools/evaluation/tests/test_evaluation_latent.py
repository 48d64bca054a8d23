"""``topkv eval`` on models with an indexer: tiny random ones beside the stock model, and ours."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from topkv import attach
from topkv.plugins import registry
from topkv_cli.group import topkv
from topkv_evaluation import DSA_CHECKPOINT
from topkv_evaluation.eval import choices, tasks
from topkv_evaluation.eval.cells import Cell, Grid, config_of, run_cells
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan
from topkv_evaluation.eval.runs import Run
from topkv_evaluation.retrieval import ASK_BYTES
from topkv_testing.integrity import check_integrity

pytestmark = pytest.mark.slow

pytest.importorskip("topkv_deepseek_dsa.entry")

FAMILIES = {
    "deepseek": (DeepseekV32Config, DeepseekV32ForCausalLM, {}),
    "glm": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
}
BOTH = pytest.mark.parametrize("family", FAMILIES)
LAYERS, TOPK, LONGEST, INDEX_DIM, NEW = 4, 16, 160, 32, 5
EXACT_KEYS = "deepseek_dsa:keys=bf16"
"""Index keys in the model's dtype: the stock model does not quantize them."""


def tiny(family, **options):
    """A random model whose weights are far larger than a trained one's, without experts."""
    config, model, own = FAMILIES[family]
    torch.manual_seed(0)
    values = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": LAYERS,
        "mlp_layer_types": ["dense"] * LAYERS,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": TOPK,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return model(config(**{**values, **own, **options})).eval()


def random_task(lengths=(LONGEST, 131), questions=3):
    """Questions of 8 tokens about random contexts; nobody knows the answers."""
    generator = torch.Generator().manual_seed(1)

    def noise(count):
        return tuple(torch.randint(1, 256, (count,), generator=generator).tolist())

    contexts = tuple(noise(length) for length in lengths)
    asked = [
        tasks.Question(i * len(lengths) // questions, noise(8), NEW) for i in range(questions)
    ]
    return tasks.Task("noise", contexts, tuple(asked), lambda tokens: "")


def run(model, task, text, share=TOPK / LONGEST, dense=()):
    choice = choices.read_algorithms([text], 64, registry())[0] if text else None
    cell = Cell(task, choice, share, tuple(dense))
    config = config_of(cell, Grid(model, "triton_attention", None, 32))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        done = Run(handle, task, cell.budget, len(task.questions))
        done.all()
        check_integrity(handle.coordinator)
        return done.answers, done.row()


def whole(task, question):
    return torch.tensor([*task.contexts[question.context], *question.tokens])[None]


def stock_answers(model, task):
    return [
        model.generate(prompt, do_sample=False, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist()
        for prompt in (whole(task, question) for question in task.questions)
    ]


@torch.no_grad()
def stock_mass(model, prompt):
    """Return each layer's attention mass of all keys at the last token, and its selection.

    Written out in float64 with keys of every head, which topkv never makes; RoPE as a product of
    complex numbers. The selection is what the stock module's indexer returned.
    """
    model, selections, found = copy.deepcopy(model).double(), [], []

    def selected(indexer, args, output):
        selections.append(output[0, -1].long())

    def attended(module, args, given, output):
        # An indexer is called within its attention; a layer without one uses the last result.
        found.append((_mass(module, given), selections[-1]))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(attended, with_kwargs=True)
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(selected)
    model(prompt, use_cache=False)
    return found


def _mass(module, given):
    x = given["hidden_states"][0]
    cos, sin = (
        angles[0, :, : module.qk_rope_head_dim // 2] for angles in given["position_embeddings"]
    )
    angles = torch.complex(cos.double(), sin.double())

    def turned(rows, angles):  # [..., R] pairs of neighbours
        return torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous()) * angles

    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x[-1:])))
    q = q.view(module.num_heads, module.qk_head_dim)
    latent, rope = module.kv_a_proj_with_mqa(x).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
    )
    keys = module.kv_b_proj(module.kv_a_layernorm(latent)).view(len(x), module.num_heads, -1)
    nope = module.qk_nope_head_dim
    logits = torch.einsum("hd,nhd->hn", q[:, :nope], keys[..., :nope])
    products = turned(q[:, nope:], angles[-1]) @ turned(rope, angles).conj().T
    return ((logits + products.real) * module.scaling).softmax(-1).mean(0)


def oracle(model, task):
    """Return held mass and the mass of the best tokens, means over questions and layers."""
    held, best = [], []
    for question in task.questions:
        for mass, chosen in stock_mass(model, whole(task, question)):
            held.append(float(mass[chosen].sum()))
            best.append(float(mass.topk(TOPK).values.sum()))
    return sum(held) / len(held), sum(best) / len(best)


@BOTH
def test_answers_and_mass_are_those_of_the_stock_model(family):
    """Attention mass of all heads together, of layers that share a selection as well."""
    model, task = tiny(family), random_task()
    answers, row = run(model, task, EXACT_KEYS)
    assert answers == stock_answers(model, task)
    held, best = oracle(model, task)
    assert 0 < held < best < 0.99
    assert (row["recall"], row["exact_recall"]) == pytest.approx((held, best), abs=1e-4)


def test_rows_in_fp8_are_decoded():
    model = tiny("deepseek", kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    task = random_task(questions=2)
    exact = run(model, task, EXACT_KEYS)[1]
    model.config.topkv = {"kv_format": "fp8"}
    packed = run(model, task, EXACT_KEYS)[1]
    assert packed["host_kv_bytes"] < exact["host_kv_bytes"]
    assert packed["recall"] == pytest.approx(exact["recall"], abs=0.03)
    assert packed["exact_recall"] == pytest.approx(exact["exact_recall"], abs=0.03)


@BOTH
@pytest.mark.parametrize(("keys", "width"), [("bf16", 4 * INDEX_DIM), ("fp8", INDEX_DIM + 4)])
def test_a_step_reads_the_index_of_the_layers_that_have_one(family, keys, width):
    """Counted in rows of 32 + 8 float32, each of which is key and value at once."""
    task = random_task((LONGEST,), questions=1)
    row = run(tiny(family), task, f"deepseek_dsa:keys={keys}")[1]
    share = {"deepseek": 1, "glm": 1 / 2}[family]
    wanted = share * (LONGEST + 8) * width / (40 * 4)
    assert row["index_tokens"] == pytest.approx(wanted, abs=1e-3)


@BOTH
def test_the_baseline_attends_to_everything(family):
    model, task = tiny(family), random_task()
    answers, row = run(model, task, None, 1.0, dense=range(LAYERS))
    everything = tiny(family, index_topk=1024)
    assert answers == stock_answers(everything, task)
    assert answers != stock_answers(model, task), "the selection shows in nothing"
    assert (row["recall"], row["hit_rate"], row["index_tokens"]) == (None, None, 0)


def test_layers_that_share_are_refused_apart_and_the_next_cell_runs():
    model, task = tiny("glm"), random_task(questions=1)
    (choice,) = choices.read_algorithms([EXACT_KEYS], 64, registry())
    grid = Grid(model, "triton_attention", None, 32)
    cells = [Cell(task, choice, 0.1, dense) for dense in ((0,), (0, 1))]
    apart, ran = run_cells(cells, grid, lambda cell: None)
    assert "layer 1 shares the selection of layer 0" in apart["refused"]
    assert (ran["questions"], ran["sparse_layers"]) == (1, 2)
    assert "refused" not in ran


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny("deepseek").save_pretrained(path)
    return path


def call(*args):
    options = ("--device", "cpu", "--dense-layers", "none", "--budgets", "25%", "--json")
    return CliRunner().invoke(topkv, ["eval", *map(str, args), *options])


def test_the_indexer_is_compared_by_default(folder):
    plan = Plan.of(Options(model=folder, contexts=(768,), questions=2))
    assert {cell.label for cell in plan.cells} == {"dense", "deepseek_dsa"}
    assert [*plan.settings()["algorithms"]] == ["deepseek_dsa"]
    usual = Plan.of(Options(contexts=(768,), questions=2))
    assert "quest" in {cell.label for cell in usual.cells}
    assert "deepseek_dsa" not in {cell.label for cell in usual.cells}


def test_algorithms_for_keys_of_heads_are_refused(folder):
    what = ("--model", folder, "--contexts", 768, "--questions", 2)
    result = call(*what, "--algorithms", "clusterkv,snapkv:generated=32")
    assert result.exit_code == 2, result.output
    for name in ("clusterkv", "snapkv"):
        assert f"(algorithm '{name}') takes attention gqa, got mla" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.nightly
def test_the_trained_indexer_finds_the_facts():
    what = ("--model", DSA_CHECKPOINT, "--contexts", 1024, "--questions", 4)
    result = call(*what, "--algorithms", "deepseek_dsa,clusterkv")
    assert result.exit_code == 0, result.stderr
    dense, ours, clusters = json.loads(result.stdout)["cells"]
    assert (dense["correct"], ours["correct"]) == (4, 4)
    assert (ours["budget_tokens"], ours["dtype"]) == (256, "bfloat16")
    assert 0.8 < ours["recall"] <= ours["exact_recall"] < 1
    assert ours["recall"] > 0.95 * ours["exact_recall"]
    # 64 codes and a scale, over a row of 64 + 32 in bfloat16.
    wanted = (1024 + ASK_BYTES) * (64 + 4) / (96 * 2)
    assert ours["index_tokens"] == pytest.approx(wanted, abs=1e-3)
    assert "takes attention gqa, got mla" in clusters["refused"]
