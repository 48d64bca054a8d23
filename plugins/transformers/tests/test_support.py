"""Refusals of models, by name, with all reasons and what to do instead."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import topkv
from topkv.errors import CapabilityError, ConfigError
from topkv.plugins import PluginRegistry
from topkv_transformers import support


def test_attaching_twice_is_refused(tiny):
    model = tiny.model()
    with topkv.attach(model, tiny.settings()), pytest.raises(CapabilityError, match="already"):
        topkv.attach(model, tiny.settings())


def test_models_beside_the_current_device_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert support._device_refusals({torch.device("cuda", 1)}) == []
    assert support._device_refusals({torch.device("cpu")}) == []
    (reason,) = support._device_refusals({torch.device("cuda", 0)})
    assert "torch.cuda.set_device(0)" in reason


def test_models_that_are_refused(tiny):
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=1, vocab_size=32))
    with pytest.raises(CapabilityError, match="GPT2LMHeadModel is not supported"):
        topkv.attach(gpt)
    with pytest.raises(CapabilityError, match="expected a transformers"):
        topkv.attach(torch.nn.Linear(2, 2))
    sliding = tiny.model("mistral", config=tiny.config("mistral", sliding_window=32))
    with pytest.raises(CapabilityError, match=r"config\.sliding_window=None"):
        topkv.attach(sliding, tiny.settings())
    model = tiny.model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    model.config.attn_logit_softcapping = 30.0
    model.config.kv_lora_rank = 8
    model.config.index_topk = 4
    with pytest.raises(CapabilityError) as refused:
        topkv.attach(model, tiny.settings())
    own = [reason for reason in refused.value.reasons if reason.startswith("transformers: ")]
    assert len(own) == 4  # other engines that are installed have reasons too
    odd = tiny.model(config=tiny.config(head_dim=48))
    with pytest.raises((CapabilityError, ConfigError), match="48"):
        topkv.attach(odd, tiny.settings())
    with pytest.raises(CapabilityError, match="no engine is installed"):
        topkv.attach(tiny.model(), registry=PluginRegistry([]))


class Wrapper(torch.nn.Module):
    """Hands a call on, and no attribute."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


def modules_elsewhere():
    """Changes of the layers, and what is said of them."""

    def layers(layers, count):
        for place in range(count):
            layers[place] = Wrapper(layers[place])

    def attention(layers, count):
        for layer in layers[:count]:
            layer.self_attn = Wrapper(layer.self_attn)

    def twice(layers, count):
        layers[count - 1] = layers[0]

    def fewer(layers, count):
        del layers[0]

    def swapped(layers, count):
        layers[0], layers[1] = layers[1], layers[0]

    return {
        "layers": (layers, 4, "layers 0-3: .* got Wrapper with none in it"),
        "attention": (attention, 4, "layers 0-3: .* got LlamaDecoderLayer with Wrapper in it"),
        "one": (attention, 1, "layers 0: .* got LlamaDecoderLayer with Wrapper in it"),
        "twice": (twice, 3, r"layers \[0, 2\] are one module"),
        "fewer": (fewer, 0, "the model has 3 layers and its config 4"),
        "swapped": (swapped, 0, "layer 0: expected layer_idx 0 .* got 1"),
    }


@pytest.mark.parametrize("name", modules_elsewhere())
def test_modules_that_stand_elsewhere_are_refused(tiny, name):
    change, count, said = modules_elsewhere()[name]
    model = tiny.model(layers=4)
    change(model.model.layers, count)
    with pytest.raises(CapabilityError) as refused:
        topkv.attach(model, tiny.settings())
    own = [reason for reason in refused.value.reasons if reason.startswith("transformers: ")]
    assert re.search(said, own[0])
    assert len(own) == (2 if name == "swapped" else 1)


def test_a_wrapper_is_refused_with_what_to_attach(tiny):
    """LoRA of PEFT has two modules around the model, and torch.compile has one."""
    wrapped = torch.nn.Module()
    wrapped.base_model = torch.nn.Module()
    wrapped.base_model.model = tiny.model()
    for outside in (wrapped, torch.compile(tiny.model())):
        with pytest.raises(CapabilityError, match="wraps a LlamaForCausalLM: ") as refused:
            topkv.attach(outside, tiny.settings())
        place = re.search(r"topkv\.attach\(model\.([\w.]+)\)", str(refused.value)).group(1)
        inside = operator.attrgetter(place)(outside)
        with topkv.attach(inside, tiny.settings()):
            assert inside.generate(**tiny.prompt(9), max_new_tokens=8).shape == (1, 17)


@pytest.mark.parametrize("advice", [5, "quest", ["unit", 16], []], ids=repr)
def test_what_a_checkpoint_recommends_must_be_a_mapping(tiny, advice):
    model = tiny.model()
    model.config.topkv = advice
    with pytest.raises(ConfigError, match="checkpoint: topkv must be a mapping, got "):
        topkv.attach(model, tiny.settings())
