"""Coded host entries under a model: it is the stock model with a cache that is rounded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

import topkv
from topkv_fp8_host_format.rows import rounded

STEPS = 12


class RoundedCache(DynamicCache):
    """Rounds keys and values as they come; the model attends to what is kept."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


@torch.no_grad()
def feed(model, prompt, cache, chunk):
    """Logits of the last ``STEPS`` tokens, each a step; those before them in chunks."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    positions, end, logits = (mask.cumsum(-1) - 1).clamp(min=0), ids.shape[1] - STEPS, []
    for start, stop in pairwise([*range(0, end, chunk), *range(end, ids.shape[1] + 1)]):
        output = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
        )
        logits.append(output.logits[:, -1])
    return torch.stack(logits[-STEPS:], 1)


@pytest.mark.parametrize("chunk", [60, 9], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_budget_that_covers_the_sequence_is_a_rounded_cache(tiny, family, chunk):
    """A key at the edge of two codes may get the other one: a step of e4m3 in one of 64."""
    model = tiny.model(family)
    prompt = tiny.prompt(57, (0, 21, 1))
    exact = feed(model, prompt, DynamicCache(config=model.config), chunk)
    stock = feed(model, prompt, RoundedCache(config=model.config), chunk)
    with topkv.attach(model, tiny.settings(host_format="fp8")) as handle:
        ours = feed(model, prompt, handle.new_cache(), chunk)
    assert (ours - stock).norm() < 0.002 * stock.norm()
    assert (exact - stock).norm() > 0.02 * stock.norm(), "rounding shows in nothing"


def test_logits_do_not_depend_on_what_was_evicted(tiny):
    model, prompt = tiny.model("llama"), tiny.prompt(57, (0, 21, 1))
    logits, misses = [], []
    sizes = {"budget": 16, "host_format": "fp8", "resident_fast_path": False}
    for buffer in (12, 640):
        with topkv.attach(model, tiny.settings(buffer=buffer, **sizes)) as handle:
            cache = handle.new_cache()
            logits.append(feed(model, prompt, cache, 9))
            misses.append(handle.coordinator.transfers_of([0, 1, 2]).misses)
    assert misses[0] > misses[1] > 0
    assert torch.equal(*logits)
