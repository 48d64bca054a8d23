"""Steps that verify drafts: vLLM looks them up in what a request has (``ngram``). Tokens are those
of stock vLLM without drafts."""

from __future__ import annotations

import random

import pytest

from plugins.vllm.tests.lives import live, same
from tools.engines.tests.steps import CHUNK
from topkv_vllm import engine_args

QUERIES = 4

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": QUERIES - 1,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
SEVERAL = {"speculative_config": NGRAM, "async_scheduling": False}


def drafting(ahead):
    """Arguments of an engine that drafts, and schedules steps ahead or not."""
    return SEVERAL | {"async_scheduling": ahead}


def repeating(prompt, tokens, seed, period):
    """A prompt whose parts come again."""
    part = prompt(period, seed)
    return (part * tokens)[:tokens]


def count_drafts(engine, monkeypatch):
    """Return a dict that gets how many steps verify several tokens, and the tokens taken back."""
    coordinator, counts = engine.session.coordinator, {"steps": 0, "drafts": 0, "rejected": 0}
    begin, rollback = coordinator.forward_begin, coordinator.rollback

    def forward_begin(decode=(), prefill=(), append=None, queries=1):
        if queries > 1 and any(slot >= 0 for slot in decode):
            counts["steps"] += 1
            counts["drafts"] += sum(append or [queries] * len(decode)) - len(decode)
        begin(decode, prefill, append, queries)

    def take_back(slots, lengths):
        counts["rejected"] += sum(map(coordinator.length, slots)) - sum(lengths)
        rollback(slots, lengths)

    monkeypatch.setattr(coordinator, "forward_begin", forward_begin)
    monkeypatch.setattr(coordinator, "rollback", take_back)
    return counts


PROMPTS = [(40, 7), (CHUNK + 1, 5), (CHUNK + 30, 11), (9, 3), (2 * CHUNK, 40), (1, 1), (120, 2)]


@pytest.mark.parametrize("verification", ["joint", "exact"])
def test_tokens_are_those_of_stock_vllm(verification, ahead, served, stock, prompt, monkeypatch):
    """Prompts come in parts beside rows that verify drafts."""
    prompts = [repeating(prompt, n, seed, period) for seed, (n, period) in enumerate(PROMPTS)]
    engine = served({"verification": verification}, **drafting(ahead))
    counts = count_drafts(engine, monkeypatch)
    assert engine.answer(prompts, 60) == stock.answer(prompts, 60)
    assert 0 < counts["rejected"] < counts["drafts"]
    assert counts["steps"] > 20
    engine.check_nothing_is_held()


def test_exact_verification_has_the_tokens_without_drafts(ahead, served, prompt, monkeypatch):
    """Selections are far below the context."""
    prompts = [repeating(prompt, n, seed, period) for seed, (n, period) in enumerate(PROMPTS)]
    small = {"budget": 64, "unit": 8, "verification": "exact"}
    engine = served(small, **drafting(ahead))
    counts = count_drafts(engine, monkeypatch)
    plain = served({"budget": 64, "unit": 8})
    assert engine.answer(prompts, 60) == plain.answer(prompts, 60)
    assert 0 < counts["rejected"] < counts["drafts"]


def test_requests_with_drafts_come_and_go(ahead, served, stock, prompt):
    """Arrivals, aborts and preemptions in random order, over found pages."""
    draw = random.Random(7)
    shared = repeating(prompt, 150, 1, 13)
    prompts = {
        f"drafted-{n}": [*shared[: draw.randint(0, 150)], *repeating(prompt, 40, n, 5)]
        for n in range(30)
    }
    tokens = {name: draw.randint(1, 60) for name in prompts}
    more = {"num_gpu_blocks_override": 17, "enable_prefix_caching": True}
    engine = served(**more, **drafting(ahead))
    aborted = live(engine, prompts, tokens, draw, preempt=0 if ahead else 0.03)
    same(engine, stock, prompts, tokens, aborted)
    assert engine.preempted


def test_drafts_leave_scheduling_to_vllm():
    assert "async_scheduling" not in engine_args({}, speculative_config=NGRAM)
