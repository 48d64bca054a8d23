"""Prefix caching: pages of other requests' prompts, found by vLLM and read from the host pool."""

from __future__ import annotations

import random

import pytest

from plugins.vllm.tests.lives import live, same
from topkv.errors import CapabilityError, HostMemoryError
from topkv_vllm import engine_args
from topkv_vllm.refusals import check

CHUNK, PAGE, LONGEST = 96, 32, 512

TIGHT = LONGEST // PAGE + 1


@pytest.fixture
def cached(served):
    """An engine with a prefix cache, which is empty: ``cached(**arguments)``."""

    def make(settings=None, **arguments):
        engine = served(settings, enable_prefix_caching=True, **arguments)
        assert engine.engine.reset_prefix_cache()
        return engine

    return make


@pytest.fixture(scope="session")
def stock_cached(stock, engines, arguments, beside):
    """Stock vLLM with a prefix cache."""
    more = {**arguments, "enable_prefix_caching": True}
    engines["stock cached"] = type(stock)(**more, **beside)
    return engines["stock cached"]


def hits(engine, name):
    """Tokens of a request's prompt that vLLM found."""
    return engine.outputs[name].num_cached_tokens


def asked(engine, name, prompt, tokens=8):
    """Tokens that one request generates, alone."""
    engine.add(name, prompt, tokens)
    engine.run()
    return engine.tokens[name][0]


def test_prompts_that_begin_like_others(cached, stock, stock_cached, prompt):
    """The first prompt comes again, with another suffix, cut at the end of a page, and longer."""
    engine, base = cached(), prompt(160)
    assert stock_cached.engine.reset_prefix_cache()
    prompts = [base, base, base[:130] + prompt(60, 1), base[:96], base + prompt(200, 2)]
    expected = [tokens for (tokens,) in stock.answer(prompts, 8)]
    for served in (engine, stock_cached):
        found = []
        for number, each in enumerate(prompts):
            assert asked(served, f"begins-{number}", each) == expected[number]
            found.append(hits(served, f"begins-{number}"))
        assert found == [0, 128, 128, 64, 160]
    engine.check_nothing_is_held()
    counts = engine.session.coordinator.transfers_of()
    assert counts.hits


def test_further_turns_find_what_was_generated(cached, stock, prompt):
    """Pages that decode steps filled are found, with the representations of these steps."""
    engine, text, computed = cached(), prompt(70), 0
    for turn in range(3):
        got = asked(engine, f"turn-{turn}", text, 40)
        assert [[got]] == stock.answer([text], 40)
        assert hits(engine, f"turn-{turn}") == computed // PAGE * PAGE
        computed = len(text + got) - 1  # no step has read the last token
        text = text + got + prompt(10, turn)
    engine.check_nothing_is_held()


def twins(prompt, name):
    """Prompts with a common beginning, which fit one step together."""
    return {f"{name}-{n}": prompt(64) + prompt(4, n) for n in range(3)}


def test_pages_that_a_step_is_about_to_fill_are_waited_for(cached, stock, prompt):
    """A request that finds such pages begins a step later, and finds them whole."""
    engine, prompts = cached(), twins(prompt, "twin")
    for name, each in prompts.items():
        engine.add(name, each, 8)
    engine.step()
    assert len(engine.session.requests.held) == 1, "the others wait"
    engine.step()
    assert len(engine.session.requests.held) == 3
    engine.run()
    got = [[engine.tokens[name][0]] for name in prompts]
    assert got == stock.answer([*prompts.values()], 8)
    assert [hits(engine, name) for name in prompts] == [0, 64, 64]
    engine.check_nothing_is_held()


def test_vllm_finds_pages_that_the_same_step_fills(served, prompt):
    """Reader and writer are scheduled at once by vLLM without waiting, and the core refuses the
    step: a page that others hold is not written."""
    engine, prompts = served(fresh=True, enable_prefix_caching=True), twins(prompt, "early")
    steps, schedule = [], engine.session.requests.schedule
    for name, each in prompts.items():
        engine.add(name, each, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine.scheduler.connector, "get_num_new_matched_tokens", lambda *_: (0, False)
        )
        patch.setattr(
            engine.session.requests, "schedule", lambda step: (steps.append(step), schedule(step))
        )
        with pytest.raises(HostMemoryError, match="pages that no other request holds"):
            engine.step()
    first, second, *_ = steps[0].scheduled_new_reqs
    assert first.num_computed_tokens == 0
    assert second.num_computed_tokens == 64
    assert second.block_ids[0][:2] == first.block_ids[0][:2]


def test_a_page_that_a_decode_step_is_about_to_fill(cached, stock, prompt, monkeypatch):
    """Another request comes at each step of one, and begins with all that this one has so far."""
    engine, base, late = cached({"max_requests": 8}), prompt(50), {}
    connector, answers = engine.scheduler.connector, []
    answer = connector.get_num_new_matched_tokens

    def reported(request, found):
        answers.append((request.request_id[:7], found, answer(request, found)[0]))
        return answers[-1][2], False

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", reported)
    engine.add("writer", base, 60)
    engine.steps(1)
    while len(engine.tokens["writer"][0]) < 55:
        so_far = base + engine.tokens["writer"][0]
        if len(so_far) % PAGE in (31, 0, 1):
            late[f"late-{len(so_far)}"] = so_far + prompt(3, len(so_far))
            engine.add([*late][-1], [*late.values()][-1], 4)
        engine.step()
    engine.run()
    assert [*late] == [f"late-{length}" for length in (63, 64, 65, 95, 96, 97)]
    got = [[engine.tokens[name][0]] for name in late]
    assert got == stock.answer([*late.values()], 4)
    # The forward that fills a page reads the last token of it; only that forward is waited for.
    waits = [(name, found) for name, found, answer in answers if answer is None]
    assert waits == [("late-64", 64), ("late-96", 96)]
    assert [hits(engine, name) for name in late] == [32, 64, 64, 64, 96, 96]
    engine.check_nothing_is_held()


def test_pages_are_evicted_and_used_again(cached, stock, prompt):
    """Other prompts push out the first one's pages in a pool of one long prompt; it comes back."""
    engine, base = cached(num_gpu_blocks_override=TIGHT), prompt(300)
    expected = [tokens for (tokens,) in stock.answer([base, prompt(400, 1)], 8)]
    assert asked(engine, "first", base) == expected[0]
    assert asked(engine, "again", base) == expected[0]
    assert asked(engine, "other", prompt(400, 1)) == expected[1]
    assert asked(engine, "evicted", base) == expected[0]
    assert asked(engine, "back", base) == expected[0]
    found = [hits(engine, name) for name in ("first", "again", "other", "evicted", "back")]
    assert found[:3] == [0, 288, 0]
    assert found[3] < 288
    assert found[4] == 288
    engine.check_nothing_is_held()


def test_the_cache_is_reset(cached, stock, prompt):
    """A reset comes between requests, and while some run: they are preempted and begin anew."""
    engine, base = cached(), prompt(150)
    expected = stock.answer([base], 12)
    assert [[asked(engine, "before", base, 12)]] == expected
    assert engine.engine.reset_prefix_cache()
    assert [[asked(engine, "after", base, 12)]] == expected
    assert hits(engine, "after") == 0
    engine.add("runs", base, 12)
    engine.steps(6)
    assert not engine.engine.reset_prefix_cache(), "vLLM refuses: its blocks are held"
    engine.preempt()
    engine.run()
    assert [[engine.tokens["runs"][0]]] == expected
    engine.check_nothing_is_held()


@pytest.mark.parametrize("pages", [4 * LONGEST // PAGE, TIGHT])
def test_common_beginnings_in_random_order(pages, cached, stock, stock_cached, prompt):
    """Arrivals, aborts, preemptions and resets, among prompts of which most begin like others."""
    draw, texts = random.Random(pages), [[]]
    while len(texts) < 41:
        text = draw.choice(texts[-8:])[: draw.randint(32, 250)]
        texts.append(text + prompt(draw.randint(1, 80), len(texts)))
    prompts = {f"random-{n}-{pages}": text for n, text in enumerate(texts[1:])}
    tokens = {name: draw.randint(1, 30) for name in prompts}
    engine = cached(num_gpu_blocks_override=pages)
    aborted = live(engine, prompts, tokens, draw, arrive=0.7, preempt=0.01)
    same(engine, stock, prompts, tokens, aborted)
    same(engine, stock_cached, prompts, tokens, aborted)
    found = sum(hits(engine, name) for name in prompts if name in engine.outputs)
    assert found > 20 * PAGE
    assert 0 < len(aborted) < 20


def test_a_hit_reads_the_host_pool(cached, prompt):
    """Found pages and computed ones give the same tokens with a small budget."""
    settings = {"budget": 128, "buffer": 128, "unit": 16, "max_requests": 2}
    engine, base = cached(settings), prompt(400)
    first = asked(engine, "computed", base, 12)
    # What is decoded is decoded sparsely, so prompts alone may be taken over for this.
    engine.engine.reset_prefix_cache()
    asked(engine, "fills", base, 1)
    assert asked(engine, "found", base, 12) == first
    assert hits(engine, "found") == 384
    engine.check_nothing_is_held()


@pytest.mark.parametrize("name", ["clusterkv", "snapkv", "double_sparsity"])
def test_algorithms_that_keep_more_than_pages_hold_are_refused(name, model, version):
    from vllm import EngineArgs

    settings = {"algorithm": name, "backend": "triton_attention", "budget": 512}
    settings |= {"dense_layers": []}
    settings |= {"params": {"outgrow": "slide"}} if name == "snapkv" else {}
    config = EngineArgs(
        **engine_args(settings, model=str(model), dtype="float32", enable_prefix_caching=True)
    ).create_engine_config()
    with pytest.raises(CapabilityError, match=f"prefix caching: {name} .*_caching=False"):
        check(config, version)
