"""An attached model with gradients on, under autocast, and in inference mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import topkv
from topkv.errors import CapabilityError

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def test_a_forward_with_gradients_on_runs(tiny, check):
    """Whoever forgets no_grad gets the logits, and generate asks for nothing."""
    model, prompt = tiny.model(), tiny.prompt(12, (0, 3))
    stock, sequences = model(**prompt).logits, model.generate(**prompt, **GREEDY)
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        ours = model(**prompt, past_key_values=cache).logits
        torch.testing.assert_close(ours[:, 3:], stock[:, 3:], rtol=1e-4, atol=1e-4)
        cache.close()
        assert torch.equal(model.generate(**prompt, **GREEDY), sequences)
        check.all_free(handle)


@pytest.mark.parametrize("trained", ["all", "q_proj", "inputs_embeds"])
def test_a_backward_is_refused(tiny, trained):
    model, prompt = tiny.model(), tiny.prompt(12)
    embeds = model.get_input_embeddings()(prompt["input_ids"]).detach()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or trained in name)
    embeds.requires_grad_(trained == "inputs_embeds")
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        logits = model(inputs_embeds=embeds, past_key_values=cache).logits
        with pytest.raises(CapabilityError, match=r"no backward.*\n.*no_grad"):
            logits.sum().backward()
        assert embeds.grad is None
        step = model(prompt["input_ids"][:, :1], past_key_values=cache).logits
        if trained != "inputs_embeds":
            with pytest.raises(CapabilityError, match="no backward"):
                step.sum().backward()


def test_gradients_of_what_is_behind_attention_are_those_of_the_model(tiny):
    """A head that is trained on frozen layers needs no backward of attention."""
    model, prompt = tiny.model(), tiny.prompt(12)
    model.requires_grad_(False)
    weight = model.lm_head.weight.requires_grad_()
    model(**prompt).logits.square().mean().backward()
    stock, weight.grad = weight.grad, None
    with topkv.attach(model, tiny.settings()) as handle:
        model(**prompt, past_key_values=handle.new_cache()).logits.square().mean().backward()
    torch.testing.assert_close(weight.grad, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attached_in", [True, False], ids=["attached_in", "attached_outside"])
def test_inference_mode_may_come_and_go(tiny, check, attached_in):
    """Tensors that live as long as the handle are no inference tensors, wherever they are made."""
    model, prompt = tiny.model(), tiny.prompt(40, (0, 3))
    stock = model.generate(**prompt, **GREEDY)
    settings = tiny.settings(budget=24, buffer=32)  # also what only misses use
    with torch.inference_mode(attached_in):
        handle = topkv.attach(model, settings)
    sparse = model.generate(**prompt, **GREEDY)
    with handle:
        for inside in (True, False, True, False):
            with torch.inference_mode(inside):
                assert torch.equal(model.generate(**prompt, **GREEDY), sparse)
                cache = handle.new_cache()
                model(**prompt, past_key_values=cache)
            fork = cache.fork()
            cache.crop(-3)
            cache.close()
            fork.close()
            check.all_free(handle)
    assert torch.equal(model.generate(**prompt, **GREEDY), stock)


@pytest.mark.parametrize("algorithm", ["quest", "double_sparsity", "snapkv", "streaming_llm"])
@pytest.mark.parametrize("direct", [True, False], ids=["forward", "generate"])
def test_autocast_is_refused(tiny, check, algorithm, direct):
    """Autocast would hand over keys of another dtype than the cache has, or queries."""
    model, prompt = tiny.model(), tiny.prompt(12)
    stock = model.generate(**prompt, **GREEDY)
    unit = 4 if algorithm == "quest" else 1
    with topkv.attach(model, tiny.settings(algorithm=algorithm, unit=unit)) as handle:
        call = partial(model, past_key_values=handle.new_cache()) if direct else model.generate
        options = {} if direct else GREEDY
        with torch.autocast(tiny.device.type, dtype=torch.bfloat16):
            with pytest.raises(CapabilityError, match=r"cannot run through topkv:\n.*autocast"):
                call(**prompt, **options)
            check.all_free(handle)
            model(**prompt)  # another cache, or none, is the model's own affair
        assert torch.equal(model.generate(**prompt, **GREEDY), stock)
