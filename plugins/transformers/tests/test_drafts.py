"""Prompt lookup: a step verifies drafted tokens, and what is rejected leaves no trace."""

from __future__ import annotations

import pytest
import torch

import topkv
from topkv.errors import CapabilityError

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("unit", [1, 4])
def test_drafts_change_no_token(tiny, check, steps, drafts, unit):
    """With a budget that covers all, the tokens are those of the stock model without drafts."""
    model, prompt = tiny.model(), tiny.prompt(24)
    more = {**GREEDY, "max_new_tokens": 60}
    stock = model.generate(**prompt, **more)
    settings = tiny.settings(max_queries=drafts + 1, unit=unit, ring_tokens=16)
    with topkv.attach(model, settings) as handle:
        queries = steps(handle)
        for _ in range(2):
            found = model.generate(**prompt, **more, prompt_lookup_num_tokens=drafts)
            assert torch.equal(found, stock)
        assert max(queries) == drafts + 1, "nothing was drafted"
        assert len(queries) < 2 * 59, "no draft was accepted"
        assert torch.equal(model.generate(**prompt, **more), stock)
        check.all_free(handle)


def test_a_chat_goes_on_behind_drafts(tiny, check):
    """A cache that drafts were taken back from serves the next turns; drafts over it are refused,
    for stock Transformers computes such a turn wrongly."""
    model, prompt = tiny.model(), tiny.prompt(24)
    more = {**GREEDY, "max_new_tokens": 20}
    with topkv.attach(model, tiny.settings(max_queries=4, ring_tokens=16)) as handle:
        ids, stock = prompt["input_ids"], prompt["input_ids"]
        cache = handle.new_cache()
        for drafts in (3, None, None):
            mask = torch.ones_like(ids)
            ids = model.generate(
                ids,
                **more,
                attention_mask=mask,
                past_key_values=cache,
                prompt_lookup_num_tokens=drafts,
            )
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, ids[:, 3:9]], 1)
        with pytest.raises(CapabilityError, match="without past_key_values"):
            model.generate(ids, **more, past_key_values=cache, prompt_lookup_num_tokens=3)
        cache.close()
        check.all_free(handle)
    for _ in range(3):
        stock = model.generate(stock, **more, attention_mask=torch.ones_like(stock))
        stock = torch.cat([stock, stock[:, 3:9]], 1)
    assert torch.equal(ids, stock)


def test_drafts_under_a_small_budget_end_as_they_began(tiny, check, steps):
    """A sparse step of several queries attends to one selection; nothing is held afterwards."""
    model, prompt = tiny.model(), tiny.prompt(120)
    with topkv.attach(model, tiny.settings(budget=32, buffer=48, max_queries=4)) as handle:
        queries = steps(handle)
        more = {**GREEDY, "max_new_tokens": 40, "prompt_lookup_num_tokens": 3}
        found = [model.generate(**prompt, **more) for _ in range(2)]
        assert torch.equal(*found)
        assert max(queries) == 4
        check.all_free(handle)


def test_too_few_queries_are_refused_with_the_number(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(12)
    with topkv.attach(model, tiny.settings(max_queries=3, ring_tokens=16)) as handle:
        with pytest.raises(CapabilityError, match="max_queries is 3; set it to 6"):
            model.generate(**prompt, **GREEDY, prompt_lookup_num_tokens=5)
        check.all_free(handle)


def test_drafts_take_over_no_prefix(tiny):
    """Prompt lookup begins with a forward of all ids, whether an argument or the checkpoint asks
    for it; pages of a call without are found by the next one without."""
    model, prompt = tiny.model(), tiny.prompt(50)
    more = {**GREEDY, "max_new_tokens": 30}
    stock = model.generate(**prompt, **more)
    pages = {"name": "prefixes", "params": {"keep": "all"}}
    with topkv.attach(model, tiny.settings(max_queries=4, ring_tokens=16, pages=pages)) as handle:
        for drafts in (None, 3, None):
            found = model.generate(**prompt, **more, prompt_lookup_num_tokens=drafts)
            assert torch.equal(found, stock)
        model.generation_config.prompt_lookup_num_tokens = 3
        assert torch.equal(model.generate(**prompt, **more), stock)
        assert handle.prefixes.counts.found == 48
