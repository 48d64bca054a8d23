"""Steps that verify drafts, some of which are rejected."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.engines.tests.steps import CHUNK, COVERED, LONGEST, Engine
from topkv_testing.integrity import check_integrity

QUERIES = 4


def live(draw):
    """Requests come with prompts of some parts, and decode with drafts, some of which are taken
    back; between steps dummy runs come, and rows stand in another order in each."""

    def shuffled(names):
        draw.shuffle(names)
        return names

    verification = draw.choice(["joint", "exact"])
    engine = Engine(
        pads=draw.randrange(2),
        order=shuffled,
        sinks=draw.choice([None, torch.tensor([1.0, -1.0, 2.0, 0.0])]),
        max_queries=QUERIES,
        verification=verification,
        **COVERED,
    )
    names, seen = ["0", "1", "2"], set()
    for number in range(24):
        tokens, rejected = {}, {}
        drafts = draw.choice([None, 1, QUERIES])  # of every request, or of each another number
        for name in names[: 1 + number // 3]:
            if draw.random() < 0.15:
                continue  # it is left out, with what it has
            computed = engine.computed.get(name, 0)
            if computed < CHUNK:
                tokens[name] = min(draw.choice([1, QUERIES, CHUNK // 3]), CHUNK - computed)
            else:
                tokens[name] = min(drafts or draw.randint(1, QUERIES), LONGEST - computed)
                rejected[name] = draw.randrange(max(tokens[name], 1))
        tokens = {name: count for name, count in tokens.items() if count}
        if not tokens:
            break
        if draw.random() < 0.2:
            engine.dummy(draw.randint(1, 4), draw.choice([1, QUERIES]))
        engine.run(tokens, rejected=rejected)
        seen |= {tokens[name] for name in rejected if name in tokens}
        check_integrity(engine.session.coordinator)
    assert engine.error() < 1e-5
    return seen


def test_drafts_are_attended_to_and_taken_back():
    seen = [live(random.Random(seed)) for seed in range(4)]
    assert {*range(1, QUERIES + 1)} <= set().union(*seen)


def test_any_drafts_are_attended_to_and_taken_back():
    @settings(max_examples=20, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(draw):
        live(draw)

    run()
