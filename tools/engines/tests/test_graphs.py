"""Decode rows of steps with prompts that are replayed, beside the same steps in Python: outputs
are the same, and all that is kept is alike to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.engines.tests.steps import CHUNK, LONGEST, Engine, same
from topkv_testing.integrity import check_integrity

QUERIES = 3


def rerun(coordinator):
    """A recorder for machines without CUDA graphs. A replay runs the body on the tensors that it
    was recorded with: views of that many rows, whatever the rows of the forward are."""

    def narrow(batch, queries):
        uploader = coordinator._tensors.uploader
        for rows in (uploader.rows, *uploader.singles):
            rows.narrow(batch)
        for lanes in coordinator.lanes:
            lanes._narrow(batch, queries)
            for single in lanes.singles:
                single._narrow(batch, 1)

    def record(body):
        recorded = coordinator.step.batch, coordinator.lanes[0].queries

        def replay():
            before = coordinator.step.batch, coordinator.lanes[0].queries
            narrow(*recorded)
            body()
            narrow(*before)

        return replay

    return record


def counting(recorder, replays):
    """A recorder that counts what is replayed."""

    def record(body):
        replay = recorder(body)

        def counted():
            replays.append(body.args[0].view.layer)
            replay()

        return counted

    return record


def recorded(engine, recorder=None, sinks=None):
    """Record what an engine's session is to replay; return the layers of replays, as they come."""
    coordinator, replays = engine.session.coordinator, []
    sinks = dict.fromkeys(coordinator.model.layers, engine.sinks if sinks is None else sinks)
    recorder = recorder or rerun(coordinator)
    engine.session.record(sinks, counting(recorder, replays))
    return replays


def close(ones, others):
    """Return True if outputs are alike but for rounding, which may depend on how many rows are
    computed at once: a graph has more than the step."""
    return ones.keys() == others.keys() and all(
        torch.allclose(ones[name], others[name], rtol=1e-5, atol=1e-5) for name in ones
    )


def live(draw, device="cpu", recorder=None):
    """Requests come with prompts of some parts, and decode with drafts or without. Returns how
    many rows were replayed at a time."""
    sinks = draw.choice([None, torch.tensor([1.0, -1.0, 2.0, 0.0], device=device)])
    changes = {
        "max_queries": draw.choice([1, QUERIES]),
        "verification": draw.choice(["joint", "exact"]),
        "dense_layers": draw.choice([[0], []]),
        "max_requests": draw.choice([3, 4]),
    }
    plain, other = (Engine(sinks=sinks, device=device, **changes) for _ in range(2))
    replays, sizes = recorded(other, recorder), set()
    assert not replays, "a recording runs nothing"
    for number in range(20):
        tokens, rejected, decoding = {}, {}, 0
        drafts = draw.choice([None, 1, changes["max_queries"]])
        for name in map(str, range(min(1 + number // 3, changes["max_requests"]))):
            computed = plain.computed.get(name, 0)
            if computed < CHUNK:
                tokens[name] = min(draw.choice([1, 5, CHUNK // 3]), CHUNK - computed)
            elif computed < LONGEST - QUERIES and draw.random() < 0.9:
                tokens[name] = drafts or draw.randint(1, changes["max_queries"])
                rejected[name] = draw.randrange(tokens[name])
                decoding += 1
        if not tokens:
            continue
        del replays[:]
        outputs = [engine.run(tokens, rejected=rejected) for engine in (plain, other)]
        assert close(*outputs), number
        most = max((tokens[name] for name in rejected), default=0)
        mixed = decoding and decoding < len(tokens) and most in (1, changes["max_queries"])
        assert replays == ([*other.session.coordinator.model.layers] if mixed else [])
        sizes |= {decoding} if mixed else set()
    assert same(plain.state(), other.state())
    check_integrity(other.session.coordinator)
    return sizes


def test_replays_are_what_python_does():
    sizes = [live(random.Random(seed)) for seed in range(6)]
    assert {1, 2, 3} <= set().union(*sizes)


def test_replays_of_any_steps_are_what_python_does():
    @settings(max_examples=20, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(draw):
        live(draw)

    run()


@pytest.mark.gpu
def test_graphs_do_what_python_does():
    from topkv_engines.graphs import CudaRecorder

    sizes = [live(random.Random(seed), "cuda", CudaRecorder()) for seed in range(8)]
    assert {1, 2} <= set().union(*sizes)


def test_other_sinks_than_recorded_are_not_replayed():
    """A graph has the place of its sinks in it."""
    sinks = torch.tensor([1.0, -1.0, 2.0, 0.0])
    plain, other = (Engine(sinks=sinks) for _ in range(2))
    replays = recorded(other, sinks=sinks + 1)
    for tokens in ({"0": CHUNK}, {"0": 1}, {"0": 1, "1": CHUNK}):
        assert same(plain.run(tokens), other.run(tokens))
    assert not replays


def test_layers_that_share_a_selection_are_not_recorded():
    """Their loads run on beside the layers that follow."""
    plain, other = (Engine(share="FS", dense_layers=[]) for _ in range(2))
    replays = recorded(other)
    for tokens in ({"0": CHUNK}, {"0": 1}, {"0": 1, "1": CHUNK}):
        assert same(plain.run(tokens), other.run(tokens))
    assert not replays
