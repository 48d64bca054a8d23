"""Refusals of an attached model: by name, with all reasons, and without losing anything."""

from __future__ import annotations

import ast
import copy
import gc
import pickle
import re
from functools import partial

import pytest
import torch

import topkv
from topkv.errors import (
    CapabilityError,
    DeviceMemoryError,
    HostMemoryError,
    RequestError,
)

PAD = 0
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def test_copies_and_pickles_are_refused(tiny):
    model = tiny.model()
    with topkv.attach(model, tiny.settings()) as handle:
        for whole in (model, handle):
            for save in (copy.deepcopy, pickle.dumps):
                with pytest.raises(RequestError, match="detach"):
                    save(whole)
        with pytest.raises(RequestError, match="detach"):
            pickle.dumps(handle.new_cache())


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"use_cache": False},
        {"output_attentions": True},
        {"assistant_tokenizer": object()},
        {"custom_generate": "somebody/loop"},
        {"token_healing": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_are_refused_by_name(tiny, check, options):
    model, prompt = tiny.model(), tiny.prompt(12)
    with topkv.attach(model, tiny.settings()) as handle:
        with pytest.raises(CapabilityError, match=next(iter(options))):
            model.generate(**prompt, **GREEDY, **options)
        check.all_free(handle)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.6},
        {"dola_layers": "low"},
        {"assistant_early_exit": 1},
        {"speculation_type": "dflash"},
        {"output_attentions": True},
        {"token_healing": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_checkpoint_has_by_default_can_be_overridden_as_advised(tiny, check, options):
    model, prompt = tiny.model(), tiny.prompt(12)
    stock = model.generate(**prompt, **GREEDY)
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    with topkv.attach(model, tiny.settings()) as handle:
        with pytest.raises(CapabilityError, match="give") as refused:
            model.generate(**prompt, **GREEDY)
        (reason,) = refused.value.reasons
        name, value = re.search(r"give (\w+)=(\w+)$", reason).groups()
        advised = {name: ast.literal_eval(value)}
        assert torch.equal(model.generate(**prompt, **GREEDY, **advised), stock)
        check.all_free(handle)


@pytest.mark.parametrize("default", ["hybrid", "static", "offloaded", "dynamic"])
def test_our_cache_goes_before_that_of_a_checkpoint(tiny, check, default):
    """Gemma 2 and 3 are published with the first, other models with use_cache=False."""
    model, prompt = tiny.model(), tiny.prompt(12)
    stock = model.generate(**prompt, **GREEDY)
    model.generation_config.cache_implementation = default
    model.generation_config.use_cache = False
    same = copy.deepcopy(model.generation_config)
    same.update(**GREEDY)
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        assert torch.equal(model.generate(**prompt, **GREEDY, past_key_values=cache), stock)
        assert cache.get_seq_length() == 12 + 7
        cache.close()
        for more in ({"cache_implementation": None}, {"use_cache": True}):
            assert torch.equal(model.generate(**prompt, **GREEDY, **more), stock)
        assert torch.equal(model.generate(**prompt, generation_config=same), stock)
        same.cache_implementation = "quantized"
        for more in ({"cache_implementation": default}, {"generation_config": same}):
            with pytest.raises(CapabilityError, match="leave cache_implementation out"):
                model.generate(**prompt, **{**GREEDY, **more})
        check.all_free(handle)


def test_all_reasons_come_at_once(tiny):
    model, prompt = tiny.model(), tiny.prompt(12)
    model.generation_config.num_beams = 4
    with (
        topkv.attach(model, tiny.settings()),
        pytest.raises(CapabilityError) as refused,
    ):
        model.generate(**prompt, assistant_model=tiny.model(), output_attentions=True)
    assert len(refused.value.reasons) == 3
    assert "assistant_model=LlamaForCausalLM: " in str(refused.value)
    assert "num_beams=4: " in str(refused.value)
    assert len(str(refused.value)) < 400


def masks():
    ones = torch.ones(2, 12, dtype=torch.long)
    right, hole, empty = ones.clone(), ones.clone(), ones.clone()
    right[1, 9:], hole[0, 4], empty[1] = 0, 0, 0
    return {"right": right, "hole": hole, "empty": empty, "short": ones[:, :8], "rows": ones[:1]}


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("direct", [True, False], ids=["forward", "generate"])
def test_masks_that_are_refused(tiny, check, name, direct):
    if direct and name == "empty":
        pytest.skip("a forward may hold a row's padding alone")
    model, prompt = tiny.model(), tiny.prompt(12, (0, 0))
    prompt["attention_mask"] = masks()[name].to(tiny.device)
    with topkv.attach(model, tiny.settings()) as handle:
        call = partial(model, past_key_values=handle.new_cache()) if direct else model.generate
        options = {} if direct else GREEDY
        with pytest.raises((CapabilityError, RequestError), match=r"mask|rows"):
            call(**prompt, **options)
        check.all_free(handle)


def test_a_turn_behind_a_row_that_has_ended(tiny, check):
    """The turn's padding is within the cache's columns. Both ways that the error names work."""
    model, prompt = tiny.model(), tiny.prompt(12, (0, 3))
    end = model.generate(**prompt, **GREEDY)[0, 14].item()  # the first row ends, the other not
    options = {**GREEDY, "eos_token_id": end}
    more = tiny.prompt(5, seed=2)["input_ids"].repeat(2, 1)
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        said = model.generate(**prompt, **options, past_key_values=cache)
        assert (said[0, 15:] == PAD).all()
        assert (said[1, 12:] != PAD).all()
        turn = torch.cat([said, more], 1)
        for given in (None, (turn != PAD).long()):
            with pytest.raises(CapabilityError, match=r"rows \[0\] .* Pad all conversations anew"):
                model.generate(turn, attention_mask=given, **options, past_key_values=cache)
        with pytest.raises(CapabilityError, match="Pad all conversations anew"):
            model(more, attention_mask=(turn != PAD)[:, : 12 + 7 + 5], past_key_values=cache)
        assert cache.get_seq_length() == 12 + 7
        cache.close()
        rows = [row[row != PAD] for row in turn]
        anew = torch.stack([torch.nn.functional.pad(r, (25 - len(r), 0)) for r in rows])
        together = model.generate(anew, attention_mask=(anew != PAD).long(), **options)
        for row, both in zip(rows, together, strict=True):
            own = handle.new_cache()
            alone = model.generate(row[None], **options, past_key_values=own)[0]
            own.close()
            assert torch.equal(alone[len(row) :], both[25 : 25 + len(alone) - len(row)])
        check.all_free(handle)


def test_forwards_that_are_refused(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(12, (0, 2))
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        four = torch.ones(2, 1, 12, 12, dtype=torch.bool, device=tiny.device)
        with pytest.raises(CapabilityError, match="2D"):
            model(ids, attention_mask=four, past_key_values=cache)
        with pytest.raises(CapabilityError, match="output_attentions"):
            model(ids, past_key_values=cache, output_attentions=True)
        model.train()
        with pytest.raises(CapabilityError, match="training"):
            model(ids, past_key_values=cache)
        model.eval()
        check.all_free(handle)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            with pytest.raises(RequestError, match="attention_mask is missing"):
                model(ids[:, :1], past_key_values=cache)
            with pytest.raises(RequestError, match="rows"):
                model(ids[:1, :1], attention_mask=mask[:1], past_key_values=cache)
            with pytest.raises(RequestError, match="whole sequence"):
                model(ids[:, :1], attention_mask=mask, past_key_values=cache)
            other = torch.nn.functional.pad(mask.flip(0), (0, 5), value=1)
            with pytest.raises(RequestError, match="left padding"):
                model(ids[:, :5], attention_mask=other, past_key_values=cache)
        with pytest.raises(RequestError, match="covers 12"):
            model.generate(**prompt, past_key_values=cache, **GREEDY)
        for call in (
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(CapabilityError):
                call()
        with pytest.raises(ValueError, match="crop"):
            cache.crop(3)
        assert [handle.coordinator.length(slot) for slot in cache.slots] == [12, 10]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_config_that_changes_later_is_refused_by_name(tiny, check, family):
    model, prompt = tiny.model(family), tiny.prompt(12)
    said = r"config was changed .* expected 2 x full_attention, got 2 x sliding_attention of 8 tok"
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        before = handle.new_cache()
        model(**prompt, past_key_values=before)
        model.config.sliding_window = 8
        again = torch.cat([prompt["input_ids"]] * 2, 1)
        for call in (
            handle.new_cache,
            before.fork,
            lambda: model.generate(**prompt, **GREEDY),
            lambda: model.generate(again, past_key_values=before, **GREEDY),
        ):
            with pytest.raises(RequestError, match=said):
                call()
        assert before.get_seq_length() == 12
        before.close()
        check.all_free(handle)
        model.config.sliding_window = None
        assert model.generate(**prompt, **GREEDY).shape == (1, 20)


@pytest.mark.parametrize("wrong", [-1.5, "2", None])
def test_a_crop_that_is_no_integer_cuts_nothing(tiny, wrong):
    model, prompt = tiny.model(), tiny.prompt(12, (0, 2))
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(**prompt, past_key_values=cache)
        with pytest.raises(TypeError) as refused:
            cache.crop(wrong)
        assert [handle.coordinator.length(slot) for slot in cache.slots] == [12, 10]
        assert cache.get_seq_length() == 12
        assert "crop expects" in str(refused.value)
        assert f"got {wrong!r}" in str(refused.value)
        cache.crop(torch.tensor(-3))
        assert [handle.coordinator.length(slot) for slot in cache.slots] == [9, 7]


def test_an_error_for_want_of_room_says_which_caches_hold_some(tiny, check):
    """Outputs that are kept, for their scores say, hold a cache each."""
    model, prompt, pair = tiny.model(), tiny.prompt(12), tiny.prompt(600, (0, 0))
    options = {**GREEDY, "return_dict_in_generate": True}
    held = r"alive: {}, with {} requests; close\(\) them, or drop .* past_key_values"
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        kept = [model.generate(**prompt, **options) for _ in range(3)]
        kept.append(handle.new_cache())
        for call in (
            lambda: model.generate(**pair, **options),  # slots
            lambda: model(**pair, past_key_values=kept[3]),
        ):
            with pytest.raises(DeviceMemoryError, match=held.format(3, 3)):
                call()
        model(**prompt, past_key_values=kept[3])
        with pytest.raises(DeviceMemoryError, match=held.format(4, 4)):
            kept[0].past_key_values.fork()
        del kept[1:]
        gc.collect()
        with pytest.raises(HostMemoryError, match=held.format(1, 1)):  # pages
            model.generate(**pair, **options)
        with pytest.raises(HostMemoryError, match=held.format(1, 1)):
            model(**pair, past_key_values=handle.new_cache())
        kept[0].past_key_values.close()
        with pytest.raises(HostMemoryError) as refused:
            model.generate(**pair, **options)
        assert "alive" not in str(refused.value)
        check.all_free(handle)
