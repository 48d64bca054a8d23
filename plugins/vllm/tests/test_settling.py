"""Algorithms that settle do that between two steps of vLLM, as ``tools/engines/tests`` has it."""

from __future__ import annotations

from tools.engines.tests.test_settling import watch


def test_tokens_are_those_of_stock_vllm(served, stock, prompt, monkeypatch):
    """Nothing is settled while vLLM's runner is at work, through arrivals, periods of decoding and
    a preemption."""
    params = {"tokens_per_cluster": 16, "window": 32, "sinks": 4}
    engine = served({"algorithm": "clusterkv", "unit": 1, "params": params})
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    coordinator = engine.session.coordinator
    found = watch(coordinator, runner, monkeypatch, "execute_model")
    prompts, names = [prompt(length) for length in (150, 33, 5)], ["first", "second", "third"]
    for name, each in zip(names, prompts, strict=True):
        engine.add(f"settled-{name}", each, 72)
        engine.steps(5)
    engine.steps(30)
    engine.preempt()
    engine.run()
    assert [[engine.tokens[f"settled-{name}"][0]] for name in names] == stock.answer(prompts, 72)
    assert len(found) > 3 * 3 * len(coordinator.layers), "prompts, periods and what was preempted"
    assert not any(within for _, _, within in found)
    engine.check_nothing_is_held()
