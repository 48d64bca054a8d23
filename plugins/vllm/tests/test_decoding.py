"""Tokens are those of stock vLLM of the same version, where everything is selected."""

from __future__ import annotations

import random

import pytest

CHUNK, PAGE, LONGEST = 96, 32, 512


def test_one_request(served, stock, prompt):
    engine = served()
    assert engine.answer([prompt(200)], 24) == stock.answer([prompt(200)], 24)
    engine.check_nothing_is_held()


def test_prompts_of_all_lengths_at_a_time(served, stock, prompt):
    """Of a token, a unit, a page, a chunk, a token more than that, and all that may be; more than
    run at a time, and in steps that mix prompts with decoding."""
    lengths = [1, 16, PAGE, CHUNK, CHUNK + 1, 2 * CHUNK + 1, LONGEST - 8]
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
    prompts, drawn = [prompt(20)] * 2, {"n": 2, "temperature": 1.0, "seed": 3}
    engine = served()
    expected = stock.answer(prompts, 12, **drawn)
    assert expected[0][0] != expected[0][1]
    assert engine.answer(prompts, 12, **drawn) == expected
    engine.check_nothing_is_held()


ALGORITHMS = {
    "quest": {},
    "streaming_llm": {},
    "clusterkv": {"unit": 1, "params": {"tokens_per_cluster": 16, "window": 32, "sinks": 4}},
    "dense": {"dense_layers": [0, 1]},
    "streamed": {"dense_layers": [0], "dense_residency": "streamed"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_that_selects_everything(name, served, stock, prompt):
    settings = {"algorithm": name} if name in ("streaming_llm", "clusterkv") else {}
    prompts = [prompt(length) for length in (150, 33, 5)]
    engine = served({**settings, **ALGORITHMS[name]})
    assert engine.answer(prompts) == stock.answer(prompts)
    engine.check_nothing_is_held()


def test_preemption_and_resume(served, stock, prompt):
    """Prompts fit the pool together and what they generate does not."""
    prompts = [prompt(length) for length in (100, 90, 110, 64)]
    engine = served(num_gpu_blocks_override=LONGEST // PAGE + 1)
    assert engine.answer(prompts, 70) == stock.answer(prompts, 70)
    assert engine.preempted > 0
    engine.check_nothing_is_held()


@pytest.mark.parametrize("pages", [4 * LONGEST // PAGE, LONGEST // PAGE + 1])
def test_arrivals_and_aborts_in_random_order(pages, served, stock, prompt):
    """Requests that are aborted have a beginning of what stock vLLM generates."""
    draw = random.Random(pages)
    prompts = {str(n): prompt(draw.randint(1, 250), n) for n in range(8)}
    tokens = {name: draw.randint(1, 30) for name in prompts}
    engine = served(num_gpu_blocks_override=pages)
    waiting, aborted = [*prompts], set()
    while waiting or engine.engine.has_unfinished_requests():
        if waiting and draw.random() < 0.4:
            name = waiting.pop()
            engine.add(name, prompts[name], tokens[name])
        if draw.random() < 0.08 and len(waiting) < len(prompts):
            name = draw.choice(sorted(prompts.keys() - waiting))
            engine.engine.abort_request([name])
            aborted.add(name)
        engine.step()
        engine.session.coordinator.check_integrity()
    engine.run()
    engine.check_nothing_is_held()
    stock.tokens = {}
    for name in prompts:
        stock.add(name, prompts[name], tokens[name])
    for name, expected in stock.run().items():
        got = engine.tokens.get(name, {0: []})[0]
        assert got == expected[0][: len(got)]
        assert name in aborted or len(got) == len(expected[0])
    assert aborted


def test_stock_vllm_is_what_it_was(served, stock, prompt):
    """Beside an engine through topkv, and in its attention backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # First: one that was closed has ended process groups that all share, and a new one makes them.
    engine = served()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    expected = stock.answer([prompt(50)])
    assert engine.answer([prompt(50)]) == stock.answer([prompt(50)]) == expected
    (layers,) = stock.llm.collective_rpc(
        lambda worker: worker.vllm_config.compilation_config.static_forward_context
    )
    kinds = {type(layer.impl).__module__.split(".")[0] for layer in layers.values()}
    assert kinds == {"vllm"}


def test_a_small_budget_reads_the_host_pool(served, prompt):
    """Selections that change: units are missed, and loaded."""
    engine = served({"budget": 128, "buffer": 128, "unit": 16, "max_requests": 2})
    ((tokens,),) = engine.answer([prompt(400)], 12)
    assert len(tokens) == 12
    counts = engine.session.coordinator.transfers_of()
    assert counts.misses > 0 < counts.hits
    engine.check_nothing_is_held()
