"""Calls of an attached model: results, and the things that they leave as they were."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import topkv
from topkv.errors import HostMemoryError, OutOfMemory, RequestError
from topkv_testing.integrity import check_integrity

GREEDY = {"max_new_tokens": 8, "do_sample": False}


class Stop(Exception):
    pass


def test_detach_restores_the_model(tiny):
    model, prompt = tiny.model(), tiny.prompt(12, (0, 3))
    before = dict(model.__dict__)
    inner = {key: copy.copy(value) for key, value in model.model.__dict__.items()}
    settings = model.config.to_dict()
    handle = topkv.attach(model, tiny.settings())
    assert handle.attached
    model.generate(**prompt, **GREEDY)
    handle.detach()
    handle.detach()
    assert not handle.attached
    assert model.__dict__ == before
    assert model.model.__dict__.keys() == inner.keys()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        assert not getattr(model.model, name)
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RequestError, match="detached"):
        handle.new_cache()
    with topkv.attach(model, tiny.settings()):
        pass
    assert model.__dict__ == before


def test_detach_keeps_a_generate_that_was_set_before(tiny):
    model = tiny.model()
    original = model.generate
    model.generate = lambda *args, **kwargs: original(*args, **kwargs)
    mine = model.generate
    with topkv.attach(model, tiny.settings()):
        assert model.generate is not mine
    assert model.generate is mine


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_forwards_run_as_before(tiny, implementation):
    """Forwards without a cache, or over the user's own, give the stock model's bits."""
    model, prompt = tiny.model(), tiny.prompt(12, (0, 3))
    model.set_attn_implementation(implementation)

    def all_ways():
        with torch.no_grad():
            plain = model(**prompt).logits
        own = DynamicCache(config=model.config)
        options = {**GREEDY, "past_key_values": own, "num_beams": 2}
        return plain, model.generate(**prompt, **options), own.layers[0].keys

    stock = all_ways()
    with topkv.attach(model, tiny.settings()) as handle:
        model.generate(**prompt, **GREEDY)
        for ours, expected in zip(all_ways(), stock, strict=True):
            assert torch.equal(ours, expected)
        assert model.config._attn_implementation == implementation
        assert handle.coordinator.requests.free == 4


@pytest.mark.parametrize("shared_config", [True, False])
def test_two_models_do_not_disturb_each_other(tiny, check, shared_config):
    config = tiny.config()
    configs = (config, config if shared_config else tiny.config("qwen3"))
    families = ("llama", "llama" if shared_config else "qwen3")
    models = [
        tiny.model(family, seed, config)
        for family, config, seed in zip(families, configs, (1, 2), strict=True)
    ]
    prompts = [tiny.prompt(20, (0, 4), seed=1), tiny.prompt(25, (2, 0), seed=2)]
    stock = [m.generate(**p, **GREEDY) for m, p in zip(models, prompts, strict=True)]
    handles = [topkv.attach(m, tiny.settings()) for m in models]
    caches = [handle.new_cache() for handle in handles]
    steps = []
    with torch.no_grad():
        for model, cache, prompt in zip(models, caches, prompts, strict=True):
            steps.append([model(**prompt, past_key_values=cache).logits[:, -1:].argmax(-1)])
        for count in range(1, 8):
            for row, (model, cache, prompt) in enumerate(
                zip(models, caches, prompts, strict=True)
            ):
                mask = torch.nn.functional.pad(prompt["attention_mask"], (0, count), value=1)
                output = model(steps[row][-1], attention_mask=mask, past_key_values=cache)
                steps[row].append(output.logits[:, -1:].argmax(-1))
    handles[0].detach()
    for row, (prompt, expected) in enumerate(zip(prompts, stock, strict=True)):
        assert torch.equal(torch.cat([prompt["input_ids"], *steps[row]], 1), expected)
    assert torch.equal(models[1].generate(**prompts[1], **GREEDY), stock[1])
    with pytest.raises(RequestError, match="another model"):
        models[1].generate(**prompts[0], past_key_values=caches[0], **GREEDY)
    with pytest.raises(RequestError, match="attached"):
        models[0](**prompts[0], past_key_values=caches[0])
    handles[1].detach()


def test_no_memory_is_reported_before_anything_runs(tiny, check):
    model = tiny.model()
    calls = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    settings = tiny.settings(max_tokens=64, max_request_tokens=64, max_requests=2)
    with topkv.attach(model, settings) as handle:
        for prompt, error in (
            (tiny.prompt(50, (0, 0)), HostMemoryError),  # both rows together
            (tiny.prompt(600), HostMemoryError),
            (tiny.prompt(8, (0, 0, 0)), OutOfMemory),  # slots
        ):
            with pytest.raises(error, match="generate needs room"):
                model.generate(**prompt, **GREEDY)
            check.all_free(handle)
        cache = handle.new_cache()
        turn = tiny.prompt(20, (0, 4))
        ids = model.generate(**turn, past_key_values=cache, **GREEDY)
        assert calls
        calls.clear()
        used = handle.coordinator.manager.host.used
        with pytest.raises(HostMemoryError, match="generate needs room"):
            model.generate(
                torch.cat([ids, ids], 1),
                attention_mask=torch.nn.functional.pad(turn["attention_mask"], (0, 36), value=1),
                past_key_values=cache,
                **GREEDY,
            )
        assert not calls
        assert handle.coordinator.manager.host.used == used
        assert cache.get_seq_length() == 27
        check_integrity(handle.coordinator)


def failing(model, at, error):
    """Raise in the middle of the layers, in the forward of number ``at``."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == at:
            raise error

    return model.model.layers[1].register_forward_pre_hook(fail)


@pytest.mark.parametrize("at", [1, 3, 6], ids=["first_chunk", "last_chunk", "decode"])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_exception_gives_everything_back(tiny, check, at, error):
    model, prompt = tiny.model(), tiny.prompt(25, (0, 3))
    options = {**prompt, **GREEDY, "prefill_chunk_size": 10}
    stock = model.generate(**options)
    with topkv.attach(model, tiny.settings()) as handle:
        hook = failing(model, at, error)
        with pytest.raises(error):
            model.generate(**options)
        hook.remove()
        check.all_free(handle)
        assert handle.requests.forward is None
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model.generate(**options), stock)
        check.all_free(handle)


@pytest.mark.parametrize("at", [1, 4], ids=["prefill", "decode"])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_failed_turn_leaves_the_cache_as_it_was(tiny, check, at, error):
    model, prompt = tiny.model(), tiny.prompt(25, (0, 3))

    def turn(cache, ids):
        mask = torch.nn.functional.pad(prompt["attention_mask"], (0, ids.shape[1] - 25), value=1)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)

    stock_cache = DynamicCache(config=model.config)
    first = turn(stock_cache, prompt["input_ids"])
    stock = turn(stock_cache, torch.cat([first, first[:, -6:]], 1))
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        assert torch.equal(turn(cache, prompt["input_ids"]), first)
        hook = failing(model, at, error)
        with pytest.raises(error):
            turn(cache, torch.cat([first, first[:, -6:]], 1))
        hook.remove()
        assert cache.get_seq_length() == 32
        check_integrity(handle.coordinator)
        assert torch.equal(turn(cache, torch.cat([first, first[:, -6:]], 1)), stock)
        cache.close()
        check.all_free(handle)


def test_an_interrupted_direct_call_is_recovered(tiny, check):
    """KeyboardInterrupt runs no hooks: the next forward cleans up."""
    model, prompt = tiny.model(), tiny.prompt(12)
    stock = model(**prompt).logits
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        hook = failing(model, 1, KeyboardInterrupt)
        cache = handle.new_cache()
        with pytest.raises(KeyboardInterrupt):
            model(**prompt, past_key_values=cache)
        hook.remove()
        assert torch.equal(model(**prompt).logits, stock)
        assert cache.get_seq_length() == 0
        ours = model(**prompt, past_key_values=cache).logits
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
        cache.close()
        check.all_free(handle)


def test_who_owns_the_cache(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(12, (0, 1))
    with topkv.attach(model, tiny.settings()) as handle:
        model.generate(**prompt, **GREEDY)
        check.all_free(handle)
        output = model.generate(**prompt, **GREEDY, return_dict_in_generate=True)
        assert handle.coordinator.requests.free == 2
        cache = output.past_key_values
        cache.close()
        cache.close()
        check.all_free(handle)
        model.generate(**prompt, past_key_values=cache, **GREEDY)
        assert cache.batch_size == 2
        del output, cache
        gc.collect()
        check.all_free(handle)


def test_a_cache_that_is_closed_in_its_own_forward_is_empty(tiny, check):
    model, prompt, other = tiny.model(), tiny.prompt(12, (0, 3)), tiny.prompt(9, (1,), seed=1)
    stock = model.generate(**other, **GREEDY)
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        cache = handle.new_cache()
        hook = model.model.layers[1].register_forward_hook(lambda *_: cache.close())
        model(**prompt, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 0
        check.all_free(handle)
        assert torch.equal(model.generate(**other, past_key_values=cache, **GREEDY), stock)
        cache.close()
        check.all_free(handle)


@pytest.mark.parametrize("pads", [(0, 3), (2, 0), (4,), (1, 2, 3)])
@pytest.mark.parametrize("direct", [True, False], ids=["forward", "generate"])
def test_a_cache_that_is_cropped_to_nothing_begins_anew(tiny, check, pads, direct):
    """Other rows, and other padding: nothing is left that they could contradict."""
    model, prompt, other = tiny.model(), tiny.prompt(12, (0, 3)), tiny.prompt(20, pads, seed=1)
    stock = model.generate(**other, **GREEDY)
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        cache = handle.new_cache()
        model.generate(**prompt, past_key_values=cache, **GREEDY)
        cache.crop(-cache.get_seq_length())
        check.all_free(handle)
        if direct:
            logits = model(**other, past_key_values=cache).logits
            assert torch.equal(logits[:, -1].argmax(-1), stock[:, 20])
        else:
            assert torch.equal(model.generate(**other, past_key_values=cache, **GREEDY), stock)
        cache.close()
        check.all_free(handle)


def test_a_cache_that_dies_during_a_forward_waits(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(12)
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        caches = [handle.new_cache(), handle.new_cache()]
        for cache in caches:
            model(**prompt, past_key_values=cache)
        free = []

        def drop(*_):
            if len(caches) == 2:
                del caches[0]
            free.append(handle.coordinator.requests.free)

        mask = torch.ones(1, 13, dtype=torch.long, device=tiny.device)
        cache = caches[1]
        hook = model.model.layers[0].register_forward_hook(drop)
        model(prompt["input_ids"][:, :1], attention_mask=mask, past_key_values=cache)
        hook.remove()
        assert free == [2]
        assert handle.coordinator.requests.free == 3
        cache.close()
        check.all_free(handle)


def test_what_the_checkpoint_recommends(tiny):
    model = tiny.model()
    model.config.topkv = {"algorithm": "quest", "unit": 8, "budget": 64}
    settings = tiny.settings(ring_tokens=16)
    for name in ("algorithm", "unit", "budget", "buffer"):
        del settings[name]
    with topkv.attach(model, {**settings, "budget": 32}) as handle:
        group = handle.config.groups[0]
        assert (group.shape.unit, group.budget) == (8, 32)
        assert handle.memory().host > 0
        origins = {setting.name: setting.origin for setting in handle.config.settings}
        assert (origins["unit"], origins["budget"]) == ("checkpoint", "user")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_waits_for_nothing(tiny):
    """A decode forward with misses runs without one host sync."""
    if tiny.device.type != "cuda":
        pytest.skip("needs a CUDA device")
    model, prompt = tiny.model(), tiny.prompt(200, (0, 3))
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 8), value=1)
    positions = mask.cumsum(-1) - 1
    token = prompt["input_ids"][:, -1:]
    with topkv.attach(model, tiny.settings(budget=24, buffer=32)) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(**prompt, past_key_values=cache)
        for step in range(8):
            end = 201 + step
            if step == 2:  # kernels are compiled, buffers are made
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(
                    token,
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, end - 1 : end],
                    past_key_values=cache,
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
