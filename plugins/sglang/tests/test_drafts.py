"""Drafts of n-grams, verified in one step: tokens are those of stock SGLang without any."""

from __future__ import annotations

import random

import pytest

from plugins.sglang.tests.lives import check_lives, draw_requests

NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_ngram_capacity": 20_000,  # a million takes 2 GB
}


@pytest.fixture(scope="module")
def drafting(served):
    """An engine that drafts, and has room for about two requests."""
    return served({"max_tokens": 640}, **NGRAM)


def test_drafts_are_kept_where_they_are_right(drafting, stock, prompt):
    """Asked for again, an answer is in the corpus, and takes a third of the steps."""
    prompts, steps = [prompt(length, 70) for length in (97, 1, 33, 64)], []
    expected = stock.answer(prompts, 40)
    for _ in range(2):
        requests = [{"prompt": each, "tokens": 40} for each in prompts]
        got = drafting.run(requests)
        assert [each["tokens"] for each in got] == expected
        steps.append(sum(each["verified"] for each in got))
    assert steps[1] < 4 * 40 / 3 < steps[0]
    drafting.check_nothing_is_held()


def test_prefixes_are_found_behind_drafts(drafting, stock, prompt):
    """The next turn of a chat finds what was drafted and kept, and nothing that was rejected."""
    chat = prompt(70, 71)
    for _ in range(3):
        (got,) = drafting.run([{"prompt": chat, "tokens": 40}])
        assert [got["tokens"]] == stock.answer([chat], 40)
        chat = [*chat, *got["tokens"], *prompt(9, 72)]
    assert got["found"] >= 128
    drafting.check_nothing_is_held()


def test_arrivals_and_aborts_in_random_order(drafting, stock, prompt):
    draw = random.Random(7)
    prompts = [prompt(draw.choice((5, 33, 64, 90)), draw.randrange(6)) for _ in range(24)]
    check_lives(drafting, stock, draw_requests(draw, prompts, longest=60))


@pytest.mark.nightly
def test_a_small_budget_selects_for_each_query(served, prompt):
    """With ``verification: exact`` drafts change no token of a selection either."""
    small = {"budget": 64, "buffer": 128, "unit": 16, "verification": "exact"}
    prompts = [prompt(length, 73) for length in (300, 97)]
    plain = served({**small, "verification": "joint"}).answer(prompts, 40)
    engine = served(small, **NGRAM)
    for _ in range(2):
        assert engine.answer(prompts, 40) == plain
    engine.check_nothing_is_held()
