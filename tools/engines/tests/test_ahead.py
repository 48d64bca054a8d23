"""Engines that schedule a step before they know which drafts of the last one they keep."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.engines.tests.steps import CHUNK, COVERED, LONGEST, Engine, lowered
from topkv import SparseCoordinator
from topkv.assembly.assembly import make_plugins
from topkv.kv.step import StepUploader
from topkv.plugins import registry
from topkv_engines import ahead, lengths, lengths_kernels
from topkv_engines.rows import sent
from topkv_testing.integrity import check_integrity

QUERIES = 4

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class EngineAhead(Engine):
    """An engine whose steps are ahead: drafts that a step has rejected are taken back two steps
    later. Lengths are on the device at once.

    Attributes:
        unknown: drafts of the last step that were rejected, by request.
    """

    def __init__(self, **options):
        self.unknown = {}
        super().__init__(ahead=True, **options)

    def run(self, tokens, finished=(), rejected=None):
        outputs = super().run(tokens, finished, rejected)
        self.unknown = {name: count for name, count in (rejected or {}).items() if name in tokens}
        return outputs

    def counted(self):
        return {name: n + self.unknown.get(name, 0) for name, n in self.computed.items()}

    def lengths(self, names, tokens, pads):
        lengths = [self.computed.get(name, 0) + tokens[name] for name in names]
        return torch.tensor(lengths + [0] * pads, dtype=torch.int32, device=self.device)


def shuffled(draw):
    def order(names):
        draw.shuffle(names)
        return names

    return order


def step(draw, engine, names):
    """Draw tokens of a step, and how many of them are rejected."""
    tokens, rejected = {}, {}
    drafts = draw.choice([None, 1, QUERIES, QUERIES])  # of every request, or of each its own
    for name in names:
        if draw.random() < 0.15:
            continue  # it is left out, with what it has
        computed = engine.computed.get(name, 0)
        if computed < CHUNK:
            tokens[name] = min(draw.choice([1, QUERIES, CHUNK // 3]), CHUNK - computed)
        else:
            room = LONGEST - computed - engine.unknown.get(name, 0)
            tokens[name] = min(drafts or draw.randint(1, QUERIES), room)
            if tokens[name] > 0:
                rejected[name] = draw.choice([0, tokens[name] - 1, draw.randrange(tokens[name])])
    return {name: count for name, count in tokens.items() if count > 0}, rejected


def live(draw, device="cpu", **changes):
    """Requests come with prompts of some parts and decode with drafts, of which some are rejected;
    return how many."""
    verification = draw.choice(["joint", "exact"])
    engine = EngineAhead(
        pads=draw.randrange(2),
        order=shuffled(draw),
        sinks=draw.choice([None, torch.tensor([1.0, -1.0, 2.0, 0.0], device=device)]),
        max_queries=QUERIES,
        verification=verification,
        device=device,
        **COVERED | changes,
    )
    names, lost = ["0", "1", "2"], 0
    for number in range(18):
        tokens, rejected = step(draw, engine, names[: 1 + number // 3])
        if not tokens:
            continue
        if draw.random() < 0.2:
            engine.dummy(draw.randint(1, 4), draw.choice([1, QUERIES]))
        engine.run(tokens, rejected=rejected)
        lost += sum(rejected.values())
        check_integrity(engine.session.coordinator)
    assert engine.error() < 1e-5
    return lost


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_attended_to_where_they_are(device):
    """Everything is selected; attention in double precision over what is kept says the same."""
    assert sum(live(random.Random(seed), device) for seed in range(2)) > 30


@pytest.mark.nightly
def test_any_life_is_attended_to_where_its_tokens_are():
    @settings(max_examples=16, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(draw):
        live(draw)

    run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verification", ["joint", "exact"])
def test_outputs_are_those_of_an_engine_that_knows(verification, device):
    """Selections are far below the context, so that limits count, and what the ring has."""
    for seed in range(2):
        draw, twin = random.Random(seed), random.Random(seed)
        small = {"max_queries": QUERIES, "verification": verification, "unit": 8, "device": device}
        known = Engine(order=shuffled(twin), **small)
        engine = EngineAhead(order=shuffled(draw), **small)
        for number in range(24):
            tokens, rejected = step(draw, engine, ["0", "1", "2"][: 1 + number // 3])
            step(twin, engine, ["0", "1", "2"][: 1 + number // 3])
            if not tokens:
                continue
            found = engine.run(tokens, rejected=rejected)
            expected = known.run(tokens, rejected=rejected)
            for at, rows in expected.items():
                assert torch.equal(found[at], rows), (seed, number, at)


GROUPS = [(8, False), (16, True), (1, True), (1, False)]


def uploaders(draw, device, batch, queries, single):
    """An upload of lengths that are counted, and one of those that are known."""
    slots = np.array([draw.choice([-1, n, n]) for n in range(batch)])
    appended = np.array([draw.randint(0, queries) for _ in slots], dtype=np.int32)
    known = np.array([draw.randint(queries, 200) for _ in slots], dtype=np.int32)
    lost = np.array([draw.randrange(queries) for _ in slots], dtype=np.int32)
    made = []
    for each in (known + lost, known):
        uploader = StepUploader(GROUPS, 40, (40, 4), torch.device(device), single)
        counted = np.stack([each, np.full_like(each, 300), np.ones_like(each)])
        appended[slots < 0] = 0
        uploader.upload(slots, counted * (slots >= 0), appended, queries)
        made.append(uploader)
    return *made, torch.tensor(known, dtype=torch.int32, device=device)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_upload_is_that_of_the_right_lengths(device, impl):
    @settings(max_examples=40, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(draw):
        queries, single = draw.randint(1, 5), draw.choice([0, 5])
        batch = draw.choice([1, 3, 32, 33])
        found, expected, known = uploaders(draw, device, batch, queries, single)
        if impl == "triton":
            groups = torch.tensor(GROUPS, dtype=torch.int32, device=device)
            lengths_kernels.launch(found, queries, known, groups)
        else:
            lengths.correct(found, queries, known)
        blocks = 1 + queries * (queries > 1 and single > 0)
        assert torch.equal(found.packed[:blocks], expected.packed[:blocks])

    run()


def test_rows_between_prompts_are_found():
    """Requests that decode have other places than their rows where prompts stand between them."""
    for order in (list, lambda names: sorted(names, reverse=True)):
        engine = EngineAhead(order=order, max_queries=QUERIES, **COVERED)
        for _ in range(3):
            engine.run({"0": CHUNK // 3})
        for part in range(3):
            engine.run({"0": QUERIES, "1": CHUNK // 3}, rejected={"0": part + 1})
        for part in range(3):
            tokens = {"0": QUERIES, "2": CHUNK // 3, "1": QUERIES}
            engine.run(tokens, rejected={"0": 3, "1": 1 + part})
        assert engine.error() < 1e-5


def test_a_request_that_is_left_out_for_a_step_loses_the_drafts_of_two():
    engine = EngineAhead(max_queries=QUERIES, **COVERED)
    for name in ("0", "1"):
        engine.run({name: CHUNK})
    engine.run({"0": QUERIES}, rejected={"0": QUERIES - 1})
    engine.run({"0": QUERIES}, rejected={"0": QUERIES - 1})
    engine.run({"1": 1})
    engine.run({"0": QUERIES, "1": QUERIES})
    slot = engine.session.requests.held["0"].slot
    assert engine.session.coordinator.length(slot) == CHUNK + 2 + QUERIES
    assert engine.error() < 1e-5


def test_a_step_that_is_not_ahead_reads_no_lengths():
    engine = EngineAhead(max_queries=QUERIES, **COVERED)
    engine.session.ahead = None
    engine.run({"0": CHUNK})
    engine.run({"0": QUERIES}, rejected={"0": QUERIES - 1})
    engine.run({"0": QUERIES})
    assert engine.error() > 1e-3, "what was rejected is attended to"


def test_lengths_that_are_not_given_are_the_hosts():
    coordinator = SparseCoordinator(lowered(max_queries=QUERIES))
    try:
        ahead.Ahead(coordinator).correct(torch.zeros(1, dtype=torch.int32), [0])  # no forward
        assert not coordinator.step.lengths.any()
    finally:
        coordinator.close()


def test_warming_up_changes_no_length():
    engine = EngineAhead(max_queries=QUERIES, **COVERED)
    for tokens in (CHUNK, QUERIES):
        engine.run({"0": tokens})
    packed = engine.session.coordinator.requests.step.packed
    before = packed.clone()
    engine.session.ahead.warm_up()
    assert torch.equal(packed, before)


def reasons(**changes):
    config = lowered(**{"max_queries": QUERIES, **changes})
    return ahead.reasons_against(config, make_plugins(registry(), config))


def test_what_counts_on_the_host_is_refused():
    assert reasons() == []
    for algorithm in ("clusterkv", "rocketkv"):
        assert reasons(algorithm=algorithm, unit=1, verification="exact") == [
            f"{algorithm} follows on the host which tokens are decoded"
        ]
    assert reasons(stages=["keydiff"]) == ["stages[0] follows requests on the host"]


def test_a_ring_that_does_not_reach_back_is_refused():
    assert reasons(unit=4, ring_tokens=12) == []
    assert reasons(unit=4, ring_tokens=12, max_queries=6) == [
        "ring_tokens must be at least 16, got 12"
    ]


def test_places_are_sent_as_they_are():
    assert sent([2, 0], torch.device("cpu")).tolist() == [2, 0]
