"""The radix cache: pages of other requests' prompts, read from the host pool."""

from __future__ import annotations

import pytest

PAGE = 32


@pytest.fixture(scope="module")
def cached(served):
    """An engine with a radix cache, which is empty: ``cached()``."""

    def make(**arguments):
        engine = served(disable_overlap_schedule=False, **arguments)
        engine.idle()
        assert engine.flush()
        return engine

    return make


def asked(engine, prompt, tokens=8):
    """Tokens that one request generates, alone, and how many of its prompt were found."""
    (got,) = engine.run([{"prompt": prompt, "tokens": tokens}])
    return got["tokens"], got["found"]


def test_prompts_that_begin_like_others(cached, stock, prompt):
    """The first prompt comes again, with another suffix, cut at the end of a page, and longer."""
    engine, base = cached(), prompt(160, 21)
    stock.idle()
    assert stock.flush()
    prompts = [base, base, base[:130] + prompt(60, 22), base[:96], base + prompt(200, 23)]
    mine, known = ([asked(each, text) for text in prompts] for each in (engine, stock))
    assert mine == known
    assert [found for _, found in mine] == [0, 128, 128, 64, 160]
    engine.check_nothing_is_held()


def test_further_turns_find_what_was_generated(cached, stock, prompt):
    """Pages that decode steps filled are found, with the representations of these steps."""
    engine, text, computed = cached(), prompt(70, 24), 0
    for turn in range(3):
        got, found = asked(engine, text, 40)
        assert [got] == stock.answer([text], 40)
        assert found == computed // PAGE * PAGE
        computed = len(text + got) - 1  # no step has read the last token
        text = text + got + prompt(10, 25 + turn)
    engine.check_nothing_is_held()


def test_pages_are_replaced_by_equal_ones(cached, stock, prompt):
    """Prompts are the same, and what is left of a step for the second one reads a page that the
    first one reads there: the cache keeps one of both, and both requests hold it."""
    engine = cached()
    before = engine.idle()["topkv"]["replaced_pages"]
    base = prompt(250, 30)  # chunks of 96, 96 and 58 tokens
    prompts = [base, base + prompt(9, 31), [*base], base[:240]]
    assert engine.answer(prompts, 40) == stock.answer(prompts, 40)
    assert engine.check_nothing_is_held()["topkv"]["replaced_pages"] > before


def test_the_cache_is_flushed(cached, stock, prompt):
    engine, base = cached(), prompt(150, 33)
    expected = stock.answer([base], 12)
    for found in (0, 128):
        assert asked(engine, base, 12) == (expected[0], found)
    engine.idle()
    assert engine.flush()
    assert asked(engine, base, 12) == (expected[0], 0)
    engine.check_nothing_is_held()


def test_without_a_radix_cache_nothing_is_found(served, stock, prompt):
    engine = served(disable_radix_cache=True)
    prompts = [prompt(150, 34)] * 3 + [prompt(90, 35)]
    assert engine.answer(prompts, 20) == stock.answer(prompts, 20)
    assert engine.check_nothing_is_held()["topkv"]["found_tokens"] == 0
