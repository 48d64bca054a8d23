"""Tests that need no SGLang: arguments, settings, versions, rows of layers, and the entry."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from topkv.errors import CapabilityError, ConfigError
from topkv.hooks.engine import EngineSetup
from topkv.plugins import registry
from topkv.types import IndexerShape
from topkv_sglang import engine_args
from topkv_sglang.engine import SglangEngine
from topkv_sglang.geometry import shape_of_layers
from topkv_sglang.latent import latent_reasons
from topkv_sglang.refusals import settings_of
from topkv_sglang.versions import TESTED, version_reasons


def test_settings_get_the_names_that_sglang_has():
    config = {"max_requests": 3, "page_tokens": 32, "max_request_tokens": 96, "budget": 64}
    more = {"random_seed": 7, "json_model_override_args": '{"mine": 1}'}
    made = engine_args(config, **more)
    assert json.loads(made.pop("json_model_override_args")) == {
        "mine": 1,
        "topkv_settings": {"budget": 64},
    }
    assert made == {
        "attention_backend": "topkv",
        "max_running_requests": 3,
        "page_size": 32,
        "context_length": 96,
        "random_seed": 7,
    }


def test_arguments_of_sglang_stand_above_defaults():
    arguments = engine_args({}, max_running_requests=2)
    assert arguments["max_running_requests"] == 2
    assert arguments["page_size"] == 64
    assert "context_length" not in arguments


def test_what_is_said_twice_is_refused_together():
    with pytest.raises(ConfigError) as caught:
        engine_args(
            {"max_requests": 3, "pages": "core"},
            max_running_requests=4,
            attention_backend="triton",
            json_model_override_args='{"topkv_settings": {}}',
        )
    reported = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 4
    assert "max_running_requests is 3 by the configuration of topkv and 4 by the" in reported
    assert "pages: the engine gives them out" in reported
    assert "attention_backend is 'topkv'" in reported


def test_settings_are_read_off_the_arguments():
    def read(text):
        return settings_of(SimpleNamespace(json_model_override_args=text))[1]

    assert read('{"topkv_settings": {"budget": 64}}') == []
    assert "'sharp'" in read('{"topkv_settings": {"scope": "sharp"}}')[0]
    assert "holds no configuration of topkv" in read("{}")[0]
    assert "must be a JSON object" in read("[]")[0]


def test_versions_that_were_not_tested_are_refused():
    (tested,) = TESTED["cpu"]
    assert not version_reasons(tested, "cpu")
    (reason,) = version_reasons("0.5.22", "cpu")
    assert "0.5.22 is not among the versions that were tested on cpu" in reason


def layer(number, **changes):
    """A layer of SGLang, as far as it is looked at."""
    plain = {
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "scaling": 0.125,
        "layer_id": number,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "use_irope": False,
        "attn_type": "decoder",
        "pos_encoding_mode": "NONE",
        "xai_temperature_len": -1,
        "k_scale": None,
    }
    return SimpleNamespace(**plain | changes)


def test_the_shape_is_that_of_the_layers():
    shape = shape_of_layers([layer(1), layer(0)], torch.float32)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (2, 4, 2)
    assert (shape.head_dim, shape.scale) == (64, 0.125)


def test_layers_that_are_not_alike_are_refused_together():
    layers = [
        layer(0, sliding_window_size=64, logit_cap=30.0),
        layer(1, scaling=1.0, attn_type="encoder_only"),
        layer(3),
    ]
    with pytest.raises(CapabilityError) as caught:
        shape_of_layers(layers, torch.float32)
    window, cap, kind, alike, numbers = caught.value.reasons
    assert window.startswith("layer 0 has a sliding window of 64 tokens")
    assert cap.startswith("layer 0 has a softcap of 30.0")
    assert kind.startswith("layer 1 has attention of type encoder_only")
    assert alike.startswith("expected layers alike")
    assert numbers == "expected a layer for each number from 0 on, got [0, 1, 3]"


def test_rows_of_latent_attention_are_no_values():
    """Values are the first elements of the rows that are keys."""
    rows = [layer(n, tp_k_head_num=1, qk_head_dim=80, v_head_dim=64) for n in (0, 1)]
    shape = shape_of_layers(rows, torch.float32, IndexerShape(4, 32))
    assert (shape.attention, shape.head_dim, shape.value_dim) == ("mla", 80, 64)
    with pytest.raises(CapabilityError, match="values of another size than keys"):
        shape_of_layers(rows, torch.float32)


def test_latent_attention_is_refused_but_for_models_with_an_indexer():
    def reasons(kind="DeepseekV32ForCausalLM", lora=False, **text):
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            hf_config=SimpleNamespace(architectures=[kind]),
        )
        given = SimpleNamespace(enable_lora=lora, lora_paths=None)
        return "\n".join(latent_reasons(given, model))

    assert not reasons(index_topk=16, index_kpool=1, index_init_tokens=0)
    assert "(MLA) without an indexer" in reasons()
    served = "(MLA) of HYV4ForCausalLM; served is DeepseekV3ForCausalLM"
    assert served in reasons(kind="HYV4ForCausalLM", index_topk=16)
    assert "would not reach the indexer" in reasons(lora=True, index_topk=16)
    changed = {"index_kpool": 4, "index_init_tokens": 1, "index_local_tokens": 1}
    every = reasons("HYV4ForCausalLM", lora=True, learnable_sink=True, **changed)
    assert "with index_kpool = 4" in every
    assert len(every.splitlines()) == 7


def test_a_model_object_is_refused_with_what_to_call():
    engine = SglangEngine(EngineSetup(registry()))
    assert len(engine.refusals(object())) == 1
    with pytest.raises(CapabilityError, match=r"\*\*topkv_sglang.engine_args"):
        engine.attach(object(), None)
