"""Tokens are those of stock vLLM of the same version, where everything is selected."""

from __future__ import annotations

import logging

import pytest

CHUNK, PAGE, LONGEST = 96, 32, 512


def test_one_request(served, stock, prompt):
    engine = served()
    assert engine.answer([prompt(200)], 24) == stock.answer([prompt(200)], 24)
    engine.check_nothing_is_held()


def test_prompts_of_all_lengths_at_a_time(served, stock, prompt):
    """Prompts are of a token, a unit, a page, a chunk, a token more, and up to the most, which is
    what the buffer holds; they are more than run at a time, and steps mix them with decoding."""
    lengths = [1, 16, PAGE, CHUNK, CHUNK + 1, 2 * CHUNK + 1, LONGEST - 8, LONGEST - 1]
    prompts = [prompt(length) for length in lengths]
    engine = served()
    expected = stock.answer(prompts, 8)
    assert engine.answer(prompts, 8) == expected
    engine.check_nothing_is_held()
    assert engine.answer(prompts[::-1], 8) == expected[::-1], "a second wave"
    engine.check_nothing_is_held()


def test_a_single_token(served, stock, prompt):
    prompts = [prompt(length) for length in (1, 100, 31)]
    engine = served()
    assert engine.answer(prompts, 1) == stock.answer(prompts, 1)
    engine.check_nothing_is_held()


def test_equal_prompts_and_several_samples(served, stock, prompt):
    prompts, drawn = [prompt(20)] * 2, {"n": 4, "temperature": 1.0, "seed": 3}
    engine = served()
    expected = stock.answer(prompts, 12, **drawn)
    assert len({*map(tuple, expected[0])}) == 4
    assert engine.answer(prompts, 12, **drawn) == expected
    engine.check_nothing_is_held()


ALGORITHMS = {
    "quest": {},
    "streaming_llm": {"algorithm": "streaming_llm"},
    "arkvale": {"algorithm": "arkvale"},
    "double_sparsity": {"algorithm": "double_sparsity"},
    "pariskv": {"algorithm": "pariskv"},
    "clusterkv": {
        "algorithm": "clusterkv",
        "unit": 1,
        "params": {"tokens_per_cluster": 16, "window": 32, "sinks": 4},
    },
    "snapkv": {"algorithm": "snapkv", "params": {"outgrow": "slide"}},
    "dense": {"dense_layers": [0, 1]},
    "streamed": {"dense_layers": [0], "dense_residency": "streamed"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_that_selects_everything(name, served, stock, prompt):
    """Tokens agree after random rows, with which workers of a GPU begin, and after a preemption.

    The preemption begins in decode and ends in a prompt: algorithms that settle do so again.
    """
    prompts = [prompt(length) for length in (150, 33, 5)]
    engine, expected = served(ALGORITHMS[name]), stock.answer(prompts)
    engine.session.warm_up()
    engine.check_nothing_is_held()
    assert engine.answer(prompts) == expected
    names = [f"{name}-{number}" for number in range(len(prompts))]
    for request, each in zip(names, prompts, strict=True):
        engine.add(request, each)
    engine.steps(8)
    engine.preempt()
    engine.run()
    assert [[engine.tokens[request][0]] for request in names] == expected
    engine.check_nothing_is_held()


def test_a_small_budget_reads_the_host_pool(served, prompt):
    """Selections change: units are missed, and loaded."""
    engine = served({"budget": 128, "buffer": 128, "unit": 16, "max_requests": 2})
    ((tokens,),) = engine.answer([prompt(400)], 12)
    assert len(tokens) == 12
    counts = engine.session.coordinator.transfers_of()
    assert counts.misses > 0 < counts.hits
    engine.check_nothing_is_held()


def test_short_requests_are_dense_and_none_depends_on_others(served, stock, prompt, caplog):
    """Requests within the budget have the tokens of stock vLLM beside longer ones, and a longer
    one has the same tokens alone."""
    with caplog.at_level(logging.INFO, "topkv"):
        engine = served({"budget": 128, "buffer": 128, "unit": 16}, fresh=True)
    assert any("requests of up to 128 tokens" in message for message in caplog.messages)
    short, long = [prompt(length) for length in (9, 60, 90)], prompt(400)
    alone = engine.answer([long], 24)
    *found, beside = engine.answer([*short, long], 24)
    assert found == stock.answer(short, 24)
    assert [beside] == alone
