"""No call of ``generate`` goes on without the cache that it was given.

Phi-3 and Phi-3.5-MoE leave it out at the first forward beyond
``original_max_position_embeddings`` columns, and compute all tokens again with another RoPE.
"""

from __future__ import annotations

import pytest
import torch
from model_cases import config_of, model_of
from transformers import DynamicCache, Phi3ForCausalLM

import topkv
from topkv.errors import CapabilityError, ConfigError
from topkv_transformers.cache import TopkvCache

BOUNDARY = 48
NAMES = ["Phi3", pytest.param("Phimoe", marks=pytest.mark.models)]


def longrope(name, device):
    made = config_of(name)
    half, hidden = made.head_dim // 2, made.head_dim * made.num_attention_heads
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 640 / BOUNDARY}
    rope |= {"original_max_position_embeddings": BOUNDARY}
    rope |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    if name == "Phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    options = {"original_max_position_embeddings": BOUNDARY, "rope_parameters": rope}
    return model_of(name, device, hidden_size=hidden, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [BOUNDARY - 7, BOUNDARY + 1, BOUNDARY + 20])
def test_requests_on_either_side_are_the_stock_model(tiny, check, name, tokens):
    """Eight tokens end at the boundary, or begin beyond it."""
    model, prompt = longrope(name, tiny.device), tiny.prompt(tokens, (0, 5))
    stock = check.run(model, prompt, 8)
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        ours = check.run(model, prompt, 8, past_key_values=cache)
        assert torch.equal(ours[0], stock[0])
        torch.testing.assert_close(ours[1], stock[1], rtol=2e-4, atol=2e-4)
        assert ours[2] is cache
        assert cache.get_seq_length() == tokens + 7
        if tokens > BOUNDARY:  # a further turn stays beyond
            more = torch.cat([ours[0], prompt["input_ids"][:, -9:]], 1)
            mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 17), value=1)
            prompt = {"input_ids": more, "attention_mask": mask}
            again = check.run(model, prompt, 4, past_key_values=cache)
            assert again[2] is cache
            assert cache.get_seq_length() == tokens + 8 + 9 + 3
        cache.close()
        check.all_free(handle)
    prepare = "prepare_inputs_for_generation"
    assert prepare not in model.__dict__


@pytest.mark.parametrize("name", NAMES)
def test_a_call_across_the_boundary_is_refused_before_it_begins(tiny, check, name):
    model, prompt = longrope(name, tiny.device), tiny.prompt(BOUNDARY - 7)
    with topkv.attach(model, tiny.settings()) as handle:
        with pytest.raises(CapabilityError, match=r"beyond 48 columns .* max_new_tokens of .* 8,"):
            check.run(model, prompt, 9)
        check.all_free(handle)
        sequences, _, cache = check.run(model, prompt, 8)  # as advised
        long = torch.cat([sequences, prompt["input_ids"]], 1)
        longer = {"input_ids": long, "attention_mask": torch.ones_like(long)}
        with pytest.raises(
            CapabilityError, match="pass all ids without past_key_values"
        ) as reported:
            check.run(model, longer, 4, past_key_values=cache)
        assert "max_new_tokens" not in str(reported.value)
        assert cache.get_seq_length() == BOUNDARY
        cache.close()
        stock = check.run(model, longer, 4, past_key_values=DynamicCache(config=model.config))
        ours = check.run(model, longer, 4)
        assert isinstance(ours[2], TopkvCache)
        assert not isinstance(stock[2], TopkvCache)
        assert torch.equal(ours[0], stock[0])


class Forgetful(Phi3ForCausalLM):
    """Changes the cache at its third forward, as nobody foresaw."""

    instead = None
    forwards = 0

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        self.forwards += 1
        if self.forwards == 3:
            name = "past_key_values" if "past_key_values" in inputs else "cache"
            inputs[name] = self.instead
        return inputs


@pytest.mark.parametrize("instead", [None, DynamicCache()], ids=["none", "another"])
def test_a_model_that_loses_the_cache_is_stopped(tiny, check, instead):
    model, prompt = Forgetful(config_of("Phi3")).eval().to(tiny.device), tiny.prompt(12)
    model.instead = instead
    with topkv.attach(model, tiny.settings()) as handle:
        with pytest.raises(CapabilityError, match="of Forgetful was given a TopkvCache of 13 col"):
            check.run(model, prompt, 8)
        check.all_free(handle)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_all_positions_is_none(tiny, check, name):
    """Phi-3 has windows of more positions than it can have."""
    model, prompt = model_of(name, tiny.device, sliding_window=640), tiny.prompt(31, (0, 17))
    stock = check.run(model, prompt, 8)
    with topkv.attach(model, tiny.settings()):
        ours = check.run(model, prompt, 8)
        assert torch.equal(ours[0], stock[0])
        torch.testing.assert_close(ours[1], stock[1], rtol=2e-4, atol=2e-4)
    with pytest.raises(
        ConfigError, match=r"at most sliding_window = 640.* got 656; set it to 640"
    ):
        topkv.attach(model, tiny.settings(max_request_tokens=656))
    model.config.sliding_window = 639
    with pytest.raises(CapabilityError, match=r"sliding_window=639.*max_position_embeddings=640"):
        topkv.attach(model, tiny.settings())


def test_a_forward_that_leaves_the_cache_out_is_refused(tiny):
    model, prompt = tiny.model(), tiny.prompt(20)
    with topkv.attach(model, tiny.settings()) as handle:
        decode = model.forward

        def forward(*args, cache=None, past_key_values=None, **kwargs):
            return decode(*args, **{**kwargs, "use_cache": False})

        model.forward = forward
        with pytest.raises(CapabilityError, match="has run no forward over the cache"):
            model.generate(**prompt, max_new_tokens=1, do_sample=False)
        del model.forward
        assert handle.coordinator.requests.free == handle.config.max_requests
