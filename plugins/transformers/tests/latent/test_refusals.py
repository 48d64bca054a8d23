"""Attached DSA models: defaults that they take over, detaching, and refusals."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from topkv.errors import CapabilityError, ConfigError, RequestError
from topkv_testing.engine.state import changes, state_of
from topkv_transformers.support import advice_of

BOTH = pytest.mark.parametrize("family", ["deepseek", "glm"])
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def ids():
    return torch.randint(2, 96, (2, 37), generator=torch.Generator().manual_seed(0))


@BOTH
def test_detach_restores_the_model_bit_for_bit(dsa, family, ids):
    model = dsa.model(family)
    # Transformers puts a forward of the class into an instance too, where it spreads a model.
    second = model.model.layers[1].self_attn
    second.forward = second.forward
    model.generate(ids, **GREEDY)
    before = state_of(model)
    with torch.no_grad():
        stock = model(ids).logits
    with dsa.attach(model) as handle:
        model.generate(ids, **GREEDY)
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
            assert torch.equal(model(ids).logits, stock), "another cache took our way"
            own = DynamicCache(config=model.config)
            assert torch.equal(model(ids, past_key_values=own).logits, stock)
            assert own.get_seq_length() == 37
    assert not changes(before, state_of(model))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock)
        with pytest.raises(RequestError, match="as long as that"):
            model(ids, past_key_values=cache)


def test_gradients_flow_where_topkv_does_not(dsa, ids):
    model = dsa.model("deepseek")
    with dsa.attach(model) as handle:
        model(ids).logits.sum().backward()
        assert model.model.layers[0].self_attn.kv_b_proj.weight.grad is not None
        output = model(ids, past_key_values=handle.new_cache())
        assert not any(store.buffer.requires_grad for store in handle.coordinator.manager.stores)
        assert output.logits.shape == (2, 37, 96)
        with pytest.raises(CapabilityError, match="no backward"):
            output.logits.sum().backward()


def test_a_backward_to_the_attention_alone_is_refused(dsa, ids):
    model = dsa.model("deepseek").requires_grad_(False)
    model.model.layers[0].self_attn.kv_b_proj.weight.requires_grad_()
    with dsa.attach(model) as handle:
        output = model(ids, past_key_values=handle.new_cache())
        with pytest.raises(CapabilityError, match="no backward"):
            output.logits.sum().backward()


@BOTH
def test_defaults_are_what_the_model_was_trained_with(dsa, family):
    model = dsa.model(family, index_topk=24)
    with dsa.attach(model) as handle:
        (group,) = handle.config.groups
        assert (group.algorithm, group.budget, group.shape.select) == ("indexed", 24, 24)
        assert group.shape.layers == tuple(range(len(model.model.layers)))
        shape = handle.shape
        assert (shape.attention, shape.num_kv_heads, shape.head_dim) == ("mla", 1, 40)
        assert (shape.out_dim, shape.indexer.num_heads, shape.indexer.head_dim) == (32, 16, 32)
    model.config.topkv = {"budget": 12}
    with dsa.attach(model) as handle:
        assert handle.config.groups[0].budget == 12
    with dsa.attach(model, budget=8) as handle:
        assert handle.config.groups[0].budget == 8


def test_forwards_and_options_that_are_refused(dsa, check, ids):
    model = dsa.model("glm")
    with dsa.attach(model) as handle:
        for options in ({"num_beams": 2}, {"cache_implementation": "static"}):
            with pytest.raises(CapabilityError, match=next(iter(options))):
                model.generate(ids, **GREEDY, **options)
        cache = handle.new_cache()
        with pytest.raises(CapabilityError, match="output_attentions"):
            model(ids, past_key_values=cache, output_attentions=True)
        with pytest.raises(CapabilityError, match="training"):
            model.train()(ids, past_key_values=cache)
        model.eval()
        with pytest.raises(RequestError, match="as long as that"):
            model.model.layers[0].self_attn(
                torch.zeros(1, 1, 64), (torch.ones(1, 1, 8),) * 2, None, past_key_values=cache
            )
        with pytest.raises(CapabilityError, match="already"):
            dsa.attach(model)
        with pytest.raises(RequestError, match="detach"):
            copy.deepcopy(model)
        with pytest.raises(CapabilityError, match="attach again after a change"):
            model.double()(ids, past_key_values=cache)
        cache.close()
        check.all_free(handle)


def _quantized(model):
    model.model.layers[2].self_attn.kv_b_proj.bfloat16()


def _wrapped(model):
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)


def _alone(model):
    model.model.layers[0].self_attn.indexer = None


def _unlike(model):
    model.model.layers[2].self_attn.indexer.index_topk = 4


def _without_latent(model):
    for layer in model.model.layers:
        layer.self_attn.q_lora_rank = None  # as Transformers 5.17 still allows


def _scaled(model):
    model.model.layers[1].self_attn.scaling *= 2


def _sliding(model):
    model.config.layer_types = ["indexed_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_quantized, "kv_b_proj is quantized"),
        (_wrapped, "kv_b_proj is quantized or wrapped"),
        (_alone, "layer 0 has no indexer"),
        (_unlike, "indexers of the layers differ"),
        (_without_latent, "q_lora_rank"),
        (_scaled, "differ in head_dim, heads or scaling"),
        (_sliding, "sliding_attention"),
    ],
)
def test_models_that_are_refused(dsa, change, reason):
    model = dsa.model("glm")
    change(model)
    before = state_of(model)
    with pytest.raises(CapabilityError, match=reason):
        dsa.attach(model)
    assert not changes(before, state_of(model))


def test_another_rope_is_refused(dsa, monkeypatch):
    model = dsa.model("deepseek")
    file = sys.modules[type(model.model).__module__]
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim: (q, k))
    with pytest.raises(CapabilityError, match="neither of halves nor of neighbours"):
        dsa.attach(model)
    monkeypatch.delattr(file, "apply_rotary_pos_emb_interleave")
    with pytest.raises(CapabilityError, match="calls none of apply_rotary"):
        dsa.attach(model)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dense_layers": [2]}, "layer 3 shares the selection of layer 2"),
        ({"layers": {"1": {"budget": 8}}}, "layer 1 shares the selection of layer 0"),
    ],
)
def test_a_shared_selection_needs_one_group(dsa, settings, reason):
    model = dsa.model("glm")
    before = state_of(model)
    with pytest.raises(ConfigError, match=reason):
        dsa.attach(model, **settings)
    assert not changes(before, state_of(model))


@pytest.mark.parametrize("dense", [[1], [2, 3], [0, 1, 2, 3]])
def test_shared_layers_that_may_be_dense(dsa, ids, dense):
    """A dense layer needs no selection; one that others share may be dense with them."""
    model = dsa.model("glm")
    with dsa.attach(model, dense_layers=dense):
        assert model.generate(ids, **GREEDY).shape == (2, 43)


def test_algorithms_without_latent_attention_are_refused(dsa):
    with pytest.raises(ConfigError, match="takes attention gqa, got mla"):
        dsa.attach(dsa.model("deepseek"), algorithm="scripted")


def test_a_model_without_an_indexer_is_advised_none(dsa):
    """DeepSeek-V3 has latent attention and selects nothing."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    small = {name: getattr(dsa.config("deepseek"), name) for name in names}
    config = DeepseekV3Config(**small, n_routed_experts=4, n_group=1, topk_group=1)
    model = DeepseekV3ForCausalLM(config)
    with pytest.raises(ConfigError, match="by the model's own indexer, and this model has none"):
        dsa.attach(model, algorithm="indexed")
    assert advice_of(dsa.model("deepseek"), dsa.registry) == {"budget": 16, "algorithm": "indexed"}
    assert advice_of(model, dsa.registry) == {}
