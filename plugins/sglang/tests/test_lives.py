"""Requests that come, are aborted and retracted: tokens are those of stock SGLang."""

from __future__ import annotations

import random

import pytest

from plugins.sglang.tests.lives import check_answers, check_lives, draw_requests

PAGE, LONGEST = 32, 512

TIGHT = LONGEST + 2 * PAGE
"""Tokens of a pool in which requests are retracted."""


OVERLAP = [True, pytest.param(False, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=OVERLAP, ids=["overlap", "normal"])
def tight(request, served):
    """An engine with a small pool whose scheduler counts on short answers."""
    return served(
        max_total_tokens=TIGHT,
        schedule_conservativeness=0.01,
        disable_overlap_schedule=not request.param,
    )


def test_arrivals_and_aborts_in_random_order(served, stock, prompt):
    """Prompts mostly begin like others, and the pool is large."""
    draw, texts = random.Random(3), [prompt(60)]
    while len(texts) < 28:
        text = draw.choice(texts[-8:])[: draw.randint(20, 250)]
        texts.append(text + prompt(draw.randint(1, 80), len(texts)))
    engine = served(disable_overlap_schedule=False)
    got = check_lives(engine, stock, draw_requests(draw, texts, aborts=0.4))
    assert sum(each["ended"]["type"] == "abort" for each in got) > 3
    assert sum(each["found"] for each in got) > 12 * PAGE


def test_arrivals_and_aborts_in_a_small_pool(tight, stock, prompt):
    draw = random.Random(7)
    prompts = [prompt(draw.randint(1, 250), n) for n in range(16)]
    check_lives(tight, stock, draw_requests(draw, prompts))


@pytest.mark.nightly
def test_two_hundred_random_requests(served, stock, model, prompt, monkeypatch):
    """Prompts of all lengths, half of which begin like others; one is retracted now and then."""
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 20)
    draw, texts = random.Random(11), [prompt(60, 9)]
    while len(texts) < 200:
        text = draw.choice(texts[-8:])[: draw.randint(20, 250)] if draw.random() < 0.5 else []
        texts.append(text + prompt(draw.randint(1, 120), len(texts)))
    requests = draw_requests(draw, texts, aborts=0.3, longest=60)
    engine = served(max_total_tokens=2 * LONGEST, disable_overlap_schedule=False)
    with monkeypatch.context() as often:
        often.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
        got = engine.run(requests)
    engine.check_nothing_is_held()
    check_answers(got, stock, requests, model)
    assert sum(each["ended"]["type"] == "abort" for each in got) > 20
    assert sum(each["retracted"] for each in got) > 20
    assert sum(each["found"] for each in got) > 20 * PAGE


def test_retracted_requests_go_on(tight, stock, prompt):
    """Requests lose their pages in decode, and read again what they had generated."""
    prompts = [prompt(length, 8) for length in (60, 90, 33, 100, 70, 64)]
    requests = [{"prompt": each, "tokens": 180} for each in prompts]
    got = check_lives(tight, stock, requests)
    assert sum(each["retracted"] for each in got)
