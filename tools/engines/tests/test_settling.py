"""Algorithms that settle do that between two steps, before the one that has to wait for it."""

from __future__ import annotations

import pytest

from tools.engines.tests.steps import CHUNK, Engine, same

PARAMS = {"tokens_per_cluster": 4, "window": 6, "sinks": 2}
SETTINGS = {"algorithm": "clusterkv", "unit": 1, "params": PARAMS}

LIVES = [
    {"0": CHUNK - 1, "1": 20},
    {"0": 1, "1": CHUNK - 20},
    *[{"0": 1, "1": 1}] * 8,
    {"0": 1, "2": CHUNK},  # one is left out, when its period has ended say
    *[{"0": 1, "1": 1, "2": 1}] * 5,
]


def watch(coordinator, held, patch, named="execute"):
    """A list of what is settled, ``(slot, length, whether a step runs)``, which grows.

    Args:
        held, named: what runs steps, and its method.
    """
    found, running = [], []
    settle, run = coordinator.prefill.settle, getattr(held, named)

    def settled(path, slot, since, length):
        if path.selector:
            found.append((slot, length, bool(running)))
        settle(path, slot, since, length)

    def execute(*arguments, **more):
        running.append(True)
        try:
            return run(*arguments, **more)
        finally:
            running.pop()

    patch.setattr(coordinator.prefill, "settle", settled)
    patch.setattr(held, named, execute)
    return found


def test_nothing_is_settled_within_a_step(monkeypatch):
    """Requests of a step settle before it when their prompt turns to decode, and once in a period;
    requests whose prompt is not through are left alone."""
    engine = Engine(pads=1, **SETTINGS)
    found = watch(engine.session.coordinator, engine, monkeypatch)
    known = []
    for tokens in LIVES:
        before = len(found)
        engine.run(tokens)
        known.append([(slot, length) for slot, length, _ in found[before:]])
    assert not any(within for _, _, within in found)
    first = [(0, CHUNK), (1, CHUNK)]
    assert known[:10] == [[], [], first, [], [], [], [], [], [(0, CHUNK + 6), (1, CHUNK + 6)], []]
    assert known[10:] == [[], [(2, CHUNK)], [], [], [(0, CHUNK + 12)], [(1, CHUNK + 12)]]


def test_it_settles_what_the_step_would_settle(monkeypatch):
    """State agrees to the bit, the buffers that are warmed too."""
    early, late = Engine(**SETTINGS), Engine(**SETTINGS)
    monkeypatch.setattr(late.session.requests, "settle", lambda: None)
    found = watch(late.session.coordinator, late, monkeypatch)
    for number, tokens in enumerate(LIVES):
        assert same(early.run(tokens), late.run(tokens)), number
    assert same(early.state(), late.state())
    assert all(within for _, _, within in found)
    assert found


def test_a_request_that_ends_with_its_prompt_is_not_settled(monkeypatch):
    engine = Engine(**SETTINGS)
    found = watch(engine.session.coordinator, engine, monkeypatch)
    engine.run({"0": CHUNK, "1": CHUNK})
    engine.run({"1": 1}, finished=["0"])
    assert found == [(1, CHUNK, False)]


def test_an_exception_while_it_settles_drops_the_step(monkeypatch):
    engine, beside = Engine(**SETTINGS), Engine(**SETTINGS)
    for each in (engine, beside):
        each.run({"0": CHUNK, "1": CHUNK - 1})

    def fail(*arguments):
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.session.coordinator.prefill, "settle", fail)
        with pytest.raises(ValueError, match="on purpose"):
            engine.run({"0": 1, "1": 1})
    assert not engine.session.requests.tokens
    for _ in range(3):
        tokens = {"0": 1, "1": 1}
        assert same(engine.run(tokens), beside.run(tokens))
