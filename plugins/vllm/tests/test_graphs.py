"""Steps that are replayed, and steps that are scheduled before the one before them has ended; on a
GPU alone. All other tests run there too, each with graphs and without."""

from __future__ import annotations

import random
import sys

import pytest
from triton.runtime.jit import JITFunction

from plugins.vllm.tests.lives import check, live
from plugins.vllm.tests.test_drafts import QUERIES, SEVERAL, repeating
from topkv_testing.integrity import check_integrity

LONGEST = 512


def replays(engine):
    """Count replays: a list of their rows, which grows."""

    def watch(worker):
        manager, rows = worker.model_runner.cudagraph_manager, []
        replay = manager.run_fullgraph

        def counted(batch):
            rows.append(batch.num_tokens)
            return replay(batch)

        manager.run_fullgraph = counted
        return rows

    (rows,) = engine.llm.collective_rpc(watch)
    return rows


@pytest.mark.gpu
def test_steps_that_decode_are_replayed_and_no_others(served, stock, graphs, prompt):
    """Three requests in a graph of four rows; a prompt of one token beside one that decodes, which
    looks like a step of two that decode, in none."""
    if not graphs:
        pytest.skip("there are none")
    engine = served(fresh=True)
    rows = replays(engine)
    prompts, tokens = [prompt(length) for length in (50, 1, 90)], [12, 6, 3]
    for number, found in enumerate([[1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 4, 4]]):
        engine.add(f"replayed-{number}", prompts[number], tokens[number])
        engine.steps(3)
        assert rows == found
    engine.run()
    assert rows == [1, 1, 2, 2, 4, 4, 1, 1, 1]
    got = [[engine.tokens[f"replayed-{number}"][0]] for number in range(3)]
    assert got == stock.answer(prompts, tokens)
    engine.check_nothing_is_held()


@pytest.mark.gpu
def test_steps_that_verify_drafts_are_replayed(served, stock, graphs, prompt):
    """Graphs are of requests with their drafts; model runner V2 drafts for each of them."""
    if not graphs:
        pytest.skip("there are none")
    engine = served(fresh=True, **SEVERAL)
    rows = replays(engine)
    prompts, tokens = [repeating(prompt, n, n, 7) for n in (50, 90, 33)], [40, 20, 60]
    assert engine.answer(prompts, tokens) == stock.answer(prompts, tokens)
    assert len(rows) > 20
    assert {*rows} <= {QUERIES, 2 * QUERIES, 4 * QUERIES}
    engine.check_nothing_is_held()


@pytest.mark.gpu
def test_a_dummy_run_between_steps_is_replayed_and_changes_nothing(served, stock, graphs, prompt):
    """Dummy runs are those of an idle data-parallel rank: no rows of the last step are found."""
    if not graphs:
        pytest.skip("there are none")
    engine = served()
    prompts = [prompt(length) for length in (60, 33, 150)]
    names = [f"between-dummies-{number}" for number in range(3)]
    for name, each in zip(names, prompts, strict=True):
        engine.add(name, each, 20)
    while engine.engine.has_unfinished_requests():
        engine.step()
        for rows in (1, 2, 4):
            engine.llm.collective_rpc(
                lambda worker, rows=rows: worker.model_runner._dummy_run(rows, uniform_decode=True)
            )
        check_integrity(engine.session.coordinator)
    engine.step()
    assert [[engine.tokens[name][0]] for name in names] == stock.answer(prompts, 20)
    engine.check_nothing_is_held()


@pytest.mark.gpu
def test_asynchronous_scheduling(served, stock, prompt):
    """Steps are scheduled before tokens are known, and one more after a request has ended, here by
    a token that ends it; with arrivals, aborts and preemptions."""
    draw = random.Random(1)
    prompts = {f"later-{n}": prompt(draw.randint(1, 250), n) for n in range(30)}
    tokens = {name: draw.randint(1, 30) for name in prompts}
    known = stock.answer([*prompts.values()], [*tokens.values()])
    ends = {
        name: each[draw.randrange(len(each))] for name, (each,) in zip(prompts, known, strict=True)
    }
    engine = served(async_scheduling=True, num_gpu_blocks_override=LONGEST // 32 + 1)
    assert engine.engine.vllm_config.scheduler_config.async_scheduling
    stops = {name: [end] for name, end in ends.items()}
    aborted = live(engine, prompts, tokens, draw, preempt=0, stop_token_ids=stops)
    expected = zip(ends.items(), known, strict=True)
    check(
        engine, {name: each[: each.index(end) + 1] for (name, end), (each,) in expected}, aborted
    )
    assert engine.preempted


def compiled():
    """Compilations of each kernel of topkv in this process, by its arguments."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("topkv")]
    kernels = {
        id(kernel): kernel
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction)
    }
    counts = {
        f"{kernel.fn.__module__}.{kernel.fn.__name__}": sum(
            len(known) for known, *_ in kernel.device_caches.values()
        )
        for kernel in kernels.values()
    }
    return {name: count for name, count in counts.items() if count}


@pytest.mark.gpu
def test_no_request_waits_for_a_compiler(served, prompt):
    """The model is of a type that no other test has, so that nothing was compiled before."""
    engine = served(fresh=True, dtype="bfloat16", enable_prefix_caching=True)
    before = compiled()
    assert len(before) > 5
    prompts = [prompt(length) for length in (250, 33, 1, 128, 96)]
    for each in (prompts, prompts):  # found, the second time
        engine.answer(each, [12, 40, 3, 70, 8])
    assert compiled() == before
