"""Assisted generation: whatever a second model drafts, the tokens are those of the first alone."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from model_cases import SLIDING, model_of

import topkv
from topkv.errors import CapabilityError

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 40}
SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}


def alike(model, noise=0.02):
    """A model that is often of one opinion with another."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in twin.parameters():
            change = torch.randn(weight.shape, generator=generator) * weight.std().cpu()
            weight += noise * change.to(weight)
    return twin


def scheduled(assistant, tokens, schedule="constant", threshold=0.0):
    """Let a model draft this many tokens a step."""
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, schedule
    config.assistant_confidence_threshold = threshold
    return assistant


@pytest.mark.sampled(6)
@pytest.mark.parametrize("own", [False, True], ids=["dense", "attached"])
@pytest.mark.parametrize(
    ("most", "tokens", "schedule", "threshold"),
    [
        (2, 1, "constant", 0.0),
        (4, 3, "constant", 0.0),
        (8, 20, "constant", 0.0),
        (5, 2, "heuristic", 0.0),
        (8, 3, "heuristic_transient", 0.6),
    ],
)
def test_an_assistant_changes_no_token(tiny, check, steps, own, most, tokens, schedule, threshold):
    """With a budget that covers all; an attached assistant drafts from a selection."""
    model, prompt = tiny.model(), tiny.prompt(45)
    stock = model.generate(**prompt, **GREEDY)
    assistant = scheduled(alike(model), tokens, schedule, threshold)
    settings = tiny.settings(max_queries=most, ring_tokens=16)
    second = topkv.attach(assistant, settings | SPARSE) if own else nullcontext()
    with topkv.attach(model, settings) as handle, second:
        queries = steps(handle)
        found = model.generate(**prompt, **GREEDY, assistant_model=assistant)
        assert torch.equal(found, stock)
        assert len(queries) < 39, "no draft was accepted"
        if schedule == "constant":
            assert max(queries) == min(tokens + 1, most)
            assert assistant.generation_config.num_assistant_tokens == tokens
        else:
            assert len(set(queries)) > 2
            assert max(queries) <= most
        assert torch.equal(model.generate(**prompt, **GREEDY), stock)
        check.all_free(handle)
        if own:
            check.all_free(second)


def test_an_attached_assistant_decodes_the_two_tokens_that_a_round_begins_with(tiny, check, steps):
    """A round behind the first is decode steps alone, and what is rejected a change of length."""
    model, prompt = tiny.model(), tiny.prompt(45)
    assistant = scheduled(alike(model), 3)
    settings = tiny.settings(max_queries=4, ring_tokens=16)
    with topkv.attach(model, settings) as handle, topkv.attach(assistant, settings) as second:
        rounds, queries = steps(handle), steps(second)
        cut, truncate = [], second.coordinator.truncate
        second.coordinator.truncate = lambda *args: cut.append(args) or truncate(*args)
        model.generate(**prompt, **GREEDY, assistant_model=assistant)
        assert set(queries) == {1, 2}
        assert len(rounds) - 1 <= queries.count(2) <= len(rounds)
        assert not cut
        check.all_free(second)
        check.all_free(handle)


@pytest.mark.parametrize("own", [False, True], ids=["dense", "attached"])
def test_padding_and_pads_among_the_tokens(tiny, check, own):
    """A row may begin with padding, and go on with a token that is the padding's."""
    model, prompt = tiny.model(), tiny.prompt(45, (7,))
    said = model.generate(**prompt, **GREEDY)
    options = {**GREEDY, "pad_token_id": said[0, 60].item()}
    assistant = scheduled(alike(model), 3)
    settings = tiny.settings(max_queries=4, ring_tokens=16)
    second = topkv.attach(assistant, settings) if own else nullcontext()
    with topkv.attach(model, settings) as handle, second:
        for given in (prompt, tiny.prompt(45)):
            ours = model.generate(**given, **options, assistant_model=assistant)
            assert torch.equal(ours, model.generate(**given, **GREEDY))
        check.all_free(handle)


@pytest.mark.parametrize("own", [False, True], ids=["dense", "attached"])
def test_samples_are_those_of_the_stock_models(tiny, check, own):
    """Acceptance of a sampled draft is drawn too, from the logits of both models."""
    model, prompt = tiny.model(), tiny.prompt(45)
    assistant = scheduled(alike(model), 3)
    options = {**GREEDY, "do_sample": True, "temperature": 1.5, "assistant_model": assistant}
    settings = tiny.settings(max_queries=4, ring_tokens=16)

    def sampled():
        torch.manual_seed(11)
        return model.generate(**prompt, **options)

    stock = sampled()
    second = topkv.attach(assistant, settings) if own else nullcontext()
    with topkv.attach(model, settings) as handle, second:
        assert torch.equal(sampled(), stock)
        check.all_free(handle)


def test_a_model_assists_itself(tiny, check, steps):
    """Its drafts are all accepted: both caches have a request of one coordinator."""
    model, prompt = tiny.model(), tiny.prompt(45)
    stock = model.generate(**prompt, **GREEDY)
    scheduled(model, 3)
    with topkv.attach(model, tiny.settings(max_queries=4, ring_tokens=16)) as handle:
        queries = steps(handle)
        assert torch.equal(model.generate(**prompt, **GREEDY, assistant_model=model), stock)
        assert queries.count(4) == 9
        check.all_free(handle)


def test_replayed_steps_of_both_models(tiny, recording):
    model, prompt = tiny.model(), tiny.prompt(45)
    assistant = scheduled(alike(model), 2, "heuristic")
    settings = tiny.settings(**SPARSE, max_queries=5, ring_tokens=16, capture="off")

    def talk(settings):
        scheduled(assistant, 2, "heuristic")
        with topkv.attach(model, settings) as handle, topkv.attach(assistant, settings) as second:
            found = [
                model.generate(**prompt, **GREEDY, assistant_model=assistant) for _ in range(2)
            ]
            return torch.cat(found), handle.capture, second.capture

    plain, off, _ = talk(settings)
    ours, report, second = talk(settings | recording)
    assert torch.equal(ours, plain)
    assert off.replayed == 0
    assert len(report.seconds) > 2
    assert second.seconds.keys() == {(1, 1), (1, 2)}
    assert report.replayed
    assert second.replayed


def test_an_assistant_may_take_over_a_prompt(tiny, check):
    """Drafts that were published with a prompt and are taken back are not found again."""
    model, prompt = tiny.model(), tiny.prompt(50)
    stock = model.generate(**prompt, **GREEDY)
    assistant = scheduled(alike(model), 3)
    pages = {"name": "prefixes", "params": {"keep": "all"}}
    settings = tiny.settings(max_queries=4, ring_tokens=16, pages=pages)
    with topkv.attach(model, settings) as handle, topkv.attach(assistant, settings):
        assistant.generate(**prompt, **GREEDY)
        for assisted in (None, assistant, assistant, None):
            found = model.generate(**prompt, **GREEDY, assistant_model=assisted)
            assert torch.equal(found, stock)
        assert handle.prefixes.counts.found == 48


def test_an_exception_leaves_neither_model_anything(tiny, check):
    """Either model fails in the middle; the next call is as if nothing had been."""
    model, prompt = tiny.model(), tiny.prompt(45)
    stock = model.generate(**prompt, **GREEDY)
    assistant = scheduled(alike(model), 3)
    settings = tiny.settings(max_queries=4, ring_tokens=16)
    with topkv.attach(model, settings) as handle, topkv.attach(assistant, settings) as second:
        for failing in (model, assistant):
            calls = iter(range(9))

            def fail(module, args, calls=calls):
                if next(calls) == 6:
                    raise KeyboardInterrupt

            hook = failing.lm_head.register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt) as held:  # and with it what was drafting
                model.generate(**prompt, **GREEDY, assistant_model=assistant)
            hook.remove()
            check.all_free(handle)
            check.all_free(second)
            assert held.traceback
            assert "_get_candidate_generator" not in vars(model)
            found = model.generate(**prompt, **GREEDY, assistant_model=assistant)
            assert torch.equal(found, stock)


def test_every_reason_against_an_assistant_comes_at_once(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(45, (0, 0))
    assistant = alike(model)
    few = tiny.settings(max_request_tokens=48, max_tokens=48, budget=48, buffer=48)
    with topkv.attach(model, tiny.settings()) as handle, topkv.attach(assistant, few):
        ids = prompt["input_ids"][:1]
        cache = handle.new_cache()
        model.generate(ids[:, :9], do_sample=False, max_new_tokens=2, past_key_values=cache)
        for given, reasons in (
            (
                prompt,
                ["max_queries is 1", "max_queries of the assistant is 1", "no room", "2; gen"],
            ),
            ({"input_ids": ids, "past_key_values": cache}, ["without past_key_values"]),
        ):
            with pytest.raises(CapabilityError) as refused:
                model.generate(**given, **GREEDY, assistant_model=assistant)
            named = "assistant_model=LlamaForCausalLM: "
            assert all(each.startswith(named) for each in refused.value.reasons)
            for reason in reasons:
                assert any(reason in each for each in refused.value.reasons), reason
        cache.close()
        check.all_free(handle)


def test_as_many_tokens_as_an_assistant_has_room_for(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(46)
    assistant, settings = alike(model), tiny.settings(max_queries=4, ring_tokens=16)
    few = settings | {"max_request_tokens": 64, "max_tokens": 64, "budget": 48, "buffer": 48}
    options = {"do_sample": False, "assistant_model": assistant}
    with topkv.attach(model, settings), topkv.attach(assistant, few) as second:
        with pytest.raises(CapabilityError, match="no room: 65 tokens exceed"):
            model.generate(**prompt, **options, max_new_tokens=21)
        assert model.generate(**prompt, **options, max_new_tokens=20).shape[1] == 66
        check.all_free(second)


def test_layers_that_cannot_go_back_are_refused_on_either_side(tiny):
    """A cache of theirs could not be cropped where a draft is rejected."""
    model, prompt = tiny.model(), tiny.prompt(45)
    mixed = model_of("Gemma3", tiny.device, layer_types=SLIDING, sliding_window=12)
    settings = tiny.settings(max_queries=4, ring_tokens=16)
    with topkv.attach(model, settings), topkv.attach(mixed, settings):
        for first, second, reason in (
            (model, mixed, "layers of the assistant that slide .* detach it, or leave"),
            (mixed, model, "layers that slide over a window .* without such layers, or leave"),
        ):
            with pytest.raises(CapabilityError, match=reason):
                first.generate(**prompt, **GREEDY, assistant_model=second)


@pytest.mark.parametrize("most", [1, 4])
def test_an_attached_assistant_of_a_model_that_is_not(tiny, check, most):
    """Nobody bounds its drafts, and what is rejected may have left its rings."""
    model, prompt = tiny.model(), tiny.prompt(45)
    stock = model.generate(**prompt, **GREEDY)
    assistant = scheduled(alike(model), 9)
    settings = tiny.settings(**SPARSE, max_queries=most)
    with topkv.attach(assistant, settings) as second:
        assert torch.equal(model.generate(**prompt, **GREEDY, assistant_model=assistant), stock)
        gc.collect()
        check.all_free(second)
