"""Lines at the start of an engine."""

from __future__ import annotations

import logging

import pytest
import torch

from tools.engines.tests.steps import LONGEST, SHAPE, Engine, lowered
from topkv_engines.report import report, whole_up_to


def test_the_length_up_to_which_nothing_is_left_out():
    assert whole_up_to(lowered()) == 32
    assert whole_up_to(lowered(budget=64, buffer=64)) == 64
    assert whole_up_to(lowered(dense_layers=[0, 1])) is None
    stages = [{"name": "top_p", "params": {"p": 0.9}}]
    assert whole_up_to(lowered(algorithm="double_sparsity", unit=1, stages=stages)) is None


@pytest.mark.parametrize("beside", [[], ["1"], ["1", "2", "3"]])
def test_a_request_of_that_length_is_dense_whatever_runs_beside_it(beside):
    """Outputs are those of everything selected up to the length, and others one token behind."""
    budget = LONGEST - 24
    both = [Engine(budget=most, buffer=most, dense_layers=[]) for most in (budget, LONGEST)]
    for engine in both:
        engine.run(dict.fromkeys(["0", *beside], 72))
        for _ in range(budget + 8 - 72):
            engine.run(dict.fromkeys(["0", *beside], 1))
    differ = [
        step
        for layer in SHAPE.layers
        for step, pair in enumerate(zip(*(each.rows[layer, "0"] for each in both), strict=True))
        if not torch.allclose(*(part[-1] for part in pair), atol=1e-4)
    ]
    assert min(differ) == budget - 72 + 1
    for each in both:
        each.session.close()


def test_who_listens_gets_the_length(caplog):
    report(lowered())
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "topkv"):
        report(lowered())
        report(lowered(dense_layers=[0, 1]))
    (message,) = caplog.messages
    assert "requests of up to 32 tokens attend to all of theirs" in message
