"""Requests that come, are aborted, preempted, resumed and left out: tokens are those of stock
vLLM, to which nothing of that happens."""

from __future__ import annotations

import random

import pytest
import torch

from plugins.vllm.tests.lives import live, same

CHUNK, PAGE, LONGEST = 96, 32, 512

TIGHT = LONGEST // PAGE + 1
"""Blocks of a pool in which requests preempt each other."""

MANY = 200 if torch.cuda.is_available() else 40
"""Requests in random order."""


@pytest.mark.parametrize("pages", [4 * LONGEST // PAGE, TIGHT])
def test_arrivals_and_aborts_in_random_order(pages, served, stock, prompt):
    draw = random.Random(pages)
    prompts = {f"random-{n}": prompt(draw.randint(1, 250), n) for n in range(MANY)}
    tokens = {name: draw.randint(1, 30) for name in prompts}
    engine = served(num_gpu_blocks_override=pages)
    aborted = live(engine, prompts, tokens, draw)
    same(engine, stock, prompts, tokens, aborted)
    assert 0 < len(aborted) < MANY / 2
    assert engine.preempted or pages != TIGHT


def test_prompts_fit_the_pool_together_and_what_they_generate_does_not(served, stock, prompt):
    """Preempted requests resume when there is room, steps later."""
    prompts = [prompt(length) for length in (100, 90, 110, 64)]
    engine = served(num_gpu_blocks_override=TIGHT)
    assert engine.answer(prompts, 70) == stock.answer(prompts, 70)
    assert engine.preempted > 0
    engine.check_nothing_is_held()


def test_one_is_preempted_in_the_middle_of_its_prompt(served, stock, prompt):
    """Others that decode need the request's pages; it resumes steps later."""
    engine = served(num_gpu_blocks_override=TIGHT)
    prompts = {"older": prompt(188), "long": prompt(250)}
    tokens = {"older": 80, "long": 4}
    engine.add("older", prompts["older"], tokens["older"])
    engine.steps(3)
    engine.add("long", prompts["long"], tokens["long"])
    engine.step()
    (long,) = (r for name, r in engine.scheduler.requests.items() if name.startswith("long"))
    assert 0 < long.num_computed_tokens < 250
    # The pool is as good as full: what the older one needs next is taken from the other.
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    engine.scheduler.max_num_scheduled_tokens, most = 1, engine.scheduler.max_num_scheduled_tokens
    try:
        while not long.num_preemptions:
            engine.step()
    finally:
        engine.scheduler.max_num_scheduled_tokens = most
    assert engine.tokens.get("long") is None, "it is still in its prompt"
    engine.steps(3)
    pool.free_blocks(taken)
    engine.run()
    same(engine, stock, prompts, tokens)


@pytest.mark.parametrize("steps", range(1, 7))
def test_all_are_preempted_and_resume_in_the_same_step(steps, served, stock, prompt):
    """Requests are in chunk 1 of 3, between chunks, after the last, or in decode."""
    engine = served()
    prompts = {f"{n}-after-{steps}": prompt(length) for n, length in enumerate((200, 33, 150))}
    for name, each in prompts.items():
        engine.add(name, each, 6)
    engine.steps(steps)
    engine.preempt()
    engine.run()
    same(engine, stock, prompts, dict.fromkeys(prompts, 6))


@pytest.mark.parametrize(
    ("steps", "got"), [(0, 0), (1, 0), (2, 0), (3, 1), (5, 3), (8, 5)], ids=str
)
def test_one_is_aborted(steps, got, served, stock, prompt):
    """A request is aborted while it waits, in chunk 1 of 3, in chunk 2, in the step of the last
    one, in decode, and after its end; another one is not disturbed."""
    engine = served()
    prompts = {f"gone-{steps}": prompt(CHUNK * 2 + 10), f"stays-{steps}": prompt(40)}
    gone, stays = prompts
    tokens = {gone: 5, stays: 12}
    engine.add(gone, prompts[gone], tokens[gone])
    engine.add(stays, prompts[stays], tokens[stays])
    engine.steps(steps)
    engine.engine.abort_request([gone])
    assert len(engine.tokens.get(gone, {0: []})[0]) == got
    engine.run()
    assert len(engine.tokens.get(gone, {0: []})[0]) == got
    same(engine, stock, prompts, tokens, {gone})


def test_one_that_runs_is_left_out_of_a_step(served, stock, prompt):
    """The token budget does not reach it; it keeps its slot and its pages."""
    engine = served()
    prompts = {f"left-out-{n}": prompt(length) for n, length in enumerate((20, 24, 150))}
    for name, each in prompts.items():
        engine.add(name, each, 10)
    engine.steps(2)
    held = dict(engine.session.requests.held)
    assert len(held) == 3
    engine.scheduler.max_num_scheduled_tokens, most = 1, engine.scheduler.max_num_scheduled_tokens
    try:
        for _ in range(3):
            lengths = [engine.session.coordinator.length(each.slot) for each in held.values()]
            engine.step()
            after = [engine.session.coordinator.length(each.slot) for each in held.values()]
            assert sum(after) == sum(lengths) + 1
            assert engine.session.requests.held == held
    finally:
        engine.scheduler.max_num_scheduled_tokens = most
    engine.run()
    same(engine, stock, prompts, dict.fromkeys(prompts, 10))
