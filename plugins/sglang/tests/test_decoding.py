"""Tokens are those of stock SGLang, where everything is selected."""

from __future__ import annotations

import pytest

CHUNK, PAGE, LONGEST = 96, 32, 512


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_prompts_of_all_lengths_at_a_time(overlap, served, stock, prompt):
    """Prompts are of a token, a unit, a page, a chunk, a token more, and up to the most, and some
    begin like others; they are more than run at a time, and steps mix them with decoding."""
    lengths = [1, 16, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 300, LONGEST - 40]
    base = prompt(150, 1)
    prompts = [prompt(length) for length in lengths]
    prompts += [base, base + prompt(70, 2), base[:100] + prompt(9, 3), [*base], base[:64]]
    tokens = [24, 1, 30, 3, 17, 24, 24, 30, 20, 24, 24, 24, 30, 24]
    engine = served(disable_overlap_schedule=not overlap)
    expected = stock.answer(prompts, tokens)
    assert engine.answer(prompts, tokens) == expected
    watched = engine.check_nothing_is_held()["watched"]
    assert watched["overlap"] == overlap
    assert watched["mixed"] > 5
    assert watched["decode"] > 20
    assert engine.answer(prompts[::-1], tokens[::-1]) == expected[::-1], "a second wave"
    found = engine.check_nothing_is_held()["topkv"]["found_tokens"]
    assert found > 10 * PAGE


def test_equal_prompts_and_several_samples(served, stock, prompt):
    prompts = [prompt(50, 4)] * 3
    engine = served(disable_overlap_schedule=False)
    assert engine.answer(prompts, 12) == stock.answer(prompts, 12)
    engine.check_nothing_is_held()


def test_a_small_budget_reads_the_host_pool(served, stock, prompt):
    """Selections change: units are missed, and loaded. Requests within the budget are dense."""
    engine = served({"budget": 128, "buffer": 128, "unit": 16, "observers": ["stalls"]})
    short, long = [prompt(length, 5) for length in (9, 60, 90)], prompt(400, 5)
    (alone,) = engine.answer([long], 24)
    counts = engine.idle()["topkv"]
    assert counts["misses"] > 0 < counts["hits"]
    assert counts["loaded_bytes"] > 0
    *found, beside = engine.answer([*short, long], 24)
    assert found == stock.answer(short, 24)
    assert beside == alone, "what was found is what was computed"
    engine.check_nothing_is_held()


ALGORITHMS = {
    "clusterkv": {"unit": 1, "params": {"tokens_per_cluster": 16, "window": 32, "sinks": 4}},
    "streaming_llm": {"dense_layers": [0], "dense_residency": "streamed"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_algorithms_that_select_everything(name, served, stock, prompt):
    """ClusterKV settles, and shares no prefixes."""
    prompts = [prompt(length, 6) for length in (150, 33, 5, 200)]
    engine = served(
        {"algorithm": name, **ALGORITHMS[name]}, disable_radix_cache=name == "clusterkv"
    )
    assert engine.answer(prompts, 40) == stock.answer(prompts, 40)
    engine.check_nothing_is_held()
