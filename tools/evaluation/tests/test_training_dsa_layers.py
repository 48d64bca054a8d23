"""Layers of the small DeepSeek-V3.2 recipe: the results of Transformers, by other kernels."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DeepseekV32ForCausalLM

from topkv_evaluation.retrieval import standard_library_text
from topkv_testing.tolerance import assert_as_good

pytestmark = pytest.mark.nightly

TRAINING = Path(__file__).parents[1] / "training"
TOPK = 8


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    sys.path.insert(0, str(TRAINING))
    try:
        parts = {name: import_module(f"dsa_{name}") for name in ("index", "model")}
        parts["base"] = import_module("retrieval_model")
        parts["batches"] = import_module("retrieval_batches")
    finally:
        sys.path.remove(str(TRAINING))
    return SimpleNamespace(**parts)


@pytest.fixture
def model(recipe: SimpleNamespace) -> Any:
    """Weights far larger than initial ones, so that attention is sharp and layers matter.

    With 16 index heads no score is exactly 0: among ties torch chooses as it likes.
    """
    torch.manual_seed(0)
    config = recipe.model.dsa_config(64, TOPK, tiny=True)
    config.index_n_heads = 16
    model = DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.fixture
def batch(recipe: SimpleNamespace) -> Any:
    text = standard_library_text("train")
    return recipe.batches.BatchMaker(text, torch.device("cpu"), 0)(2, 64)


@pytest.mark.parametrize("topk", [TOPK, 64])
def test_blocked_forward_is_that_of_transformers(
    recipe: SimpleNamespace, model: Any, batch: Any, topk: int
) -> None:
    model.config.index_topk = topk
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = topk
    with torch.no_grad():
        layers = recipe.model.dsa_layers(model, topk, elements=2 * 16 * 64 * 10)
        ours = recipe.base.causal_logits(model, batch.tokens, layers)
        theirs = model(batch.tokens).logits
        truth = model.double()(batch.tokens).logits
    assert_as_good(ours, truth, theirs, "logits")


def test_dense_forward_is_that_of_transformers(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 64
    with torch.no_grad():
        ours = recipe.base.causal_logits(model, batch.tokens, recipe.model.dsa_layers(model))
        theirs = model(batch.tokens).logits
        truth = model.double()(batch.tokens).logits
    assert_as_good(ours, truth, theirs, "logits")


def target_oracle(attention: Any, x: Tensor) -> Tensor:
    """Return p [B, n, n] in float64 from the weights, rotations as complex products."""
    weights = {name: value.double() for name, value in attention.state_dict().items()}
    nope, rope, heads = (
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
        attention.num_heads,
    )
    batch, tokens, _ = x.shape

    def normed(name: str, values: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(values, values.shape[-1:], weights[name], 1e-6)

    latent = normed("q_a_layernorm.weight", x.double() @ weights["q_a_proj.weight"].T)
    q = (latent @ weights["q_b_proj.weight"].T).view(batch, tokens, heads, nope + rope)
    pair = x.double() @ weights["kv_a_proj_with_mqa.weight"].T
    latent = normed("kv_a_layernorm.weight", pair[..., :-rope].contiguous())
    k = (latent @ weights["kv_b_proj.weight"].T).view(batch, tokens, heads, -1)[..., :nope]
    inverse = 500000.0 ** -(torch.arange(0, rope, 2).double() / rope)
    angles = torch.arange(tokens)[:, None] * inverse
    turn = torch.polar(torch.ones_like(angles), angles)
    q_turned = torch.view_as_complex(q[..., nope:].unflatten(-1, (-1, 2)).contiguous())
    k_turned = torch.view_as_complex(pair[..., -rope:].unflatten(-1, (-1, 2)).contiguous()) * turn
    logits = torch.einsum("bqhd,bkhd->bhqk", q[..., :nope], k)
    q_turned = q_turned * turn[:, None]
    logits = logits + torch.einsum("bqhd,bkd->bhqk", q_turned, k_turned.conj()).real
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits = (logits / (nope + rope) ** 0.5).masked_fill(future, -torch.inf)
    return logits.softmax(-1).sum(1) / heads


def test_target_is_the_models_own_attention(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    """p of the first layer against float64, no worse than eager probabilities of Transformers."""
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 64
    core, attention = model.model, model.model.layers[0].self_attn
    with torch.no_grad():
        x = core.layers[0].input_layernorm(core.embed_tokens(batch.tokens))
        angles = core.rotary_emb(x, position_ids=torch.arange(64)[None])
        q, k, _, _ = recipe.model.project_heads(attention, x, *angles)
        visible = recipe.index.causal(torch.arange(64), 64)
        ours = recipe.index.attention_mass(q, k, visible, attention.scaling)
        truth = target_oracle(attention, x)
        model.set_attn_implementation("eager")
        rough = model(batch.tokens, output_attentions=True).attentions[0].mean(1)
    assert (rough - truth).abs().max() < 1e-4
    assert_as_good(ours, truth, rough, "p")
    assert torch.allclose(ours.sum(-1), torch.ones(()))


def test_bfloat16_autocast_runs_every_kind_of_layer(
    recipe: SimpleNamespace, model: Any, batch: Any
) -> None:
    """The mixture of dtypes that a GPU sees; probabilities and scores stay in fp32."""
    exact = recipe.base.causal_logits(model, batch.tokens, recipe.model.dsa_layers(model))
    for topk, learn in [(None, False), (None, True), (TOPK, False), (TOPK, True)]:
        layers = recipe.model.dsa_layers(model, topk, learn=learn, measure=TOPK)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = recipe.base.causal_logits(model, batch.tokens, layers)
        (logits.float().logsumexp(-1).mean() + recipe.model.mean_loss(layers)).backward()
        for layer in layers:
            assert layer.recall.dtype == layer.loss.dtype == torch.float32
            assert 0 < layer.recall[0] <= layer.recall[1] + 1e-6
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        if topk is None:
            assert (logits.float() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_kernels_take_the_shapes_of_the_full_size(recipe: SimpleNamespace) -> None:
    """Dense attention by the flash kernel, masked attention by the memory-efficient one."""
    torch.manual_seed(0)
    sizes = ((64, 2048), (64, 2048), (32, 2048))
    q, k, v = (torch.randn(2, 8, n, d, device="cuda", dtype=torch.bfloat16) for d, n in sizes)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    heads = recipe.model.Heads(*leaves, q)
    rows = torch.arange(2048, device="cuda")
    masks = [recipe.index.causal(part, int(part[-1]) + 1) for part in rows.split(768)]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        dense = recipe.model.dense_attention(heads, 0.125)
        expected = torch.autograd.grad(dense.float().square().sum(), leaves)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        masked = recipe.model.masked_attention(heads, masks, 0.125)
        found = torch.autograd.grad(masked.float().square().sum(), leaves)
    products = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * 0.125
    future = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").triu(1)
    truth = products.masked_fill(future, -torch.inf).softmax(-1) @ v.double()
    assert_as_good(masked, truth, dense, "masked attention")
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).abs().max() < 0.05 * right.abs().max()
