"""Rows that pad a step, dummy runs and rows in other orders, as steps that are replayed have them.
``test_mutants.py`` breaks each rule."""

from __future__ import annotations

import random
from functools import partial

import pytest
from attrs import evolve

from tools.engines.tests.steps import CHUNK, COVERED, Engine, Plain, lowered, same
from topkv import SparseCoordinator
from topkv.errors import DeviceMemoryError
from topkv_engines.memory import check_device
from topkv_engines.session import Session
from topkv_testing.integrity import check_integrity


@pytest.mark.parametrize("pads", [1, 2])
def test_padded_rows_change_nothing(pads):
    """Steps decode, fill units and pages, mix with a prompt, and lose a request."""
    plain, padded = Engine(), Engine(pads)
    steps = [{"0": CHUNK, "1": 33}, {"0": 1, "1": CHUNK - 33}, *[{"0": 1, "1": 1}] * 20]
    steps += [{"0": 1, "1": 1, "2": CHUNK - 1}, {"0": 1, "1": 1, "2": 1}, {"0": 1, "1": 1, "2": 1}]
    for number, tokens in enumerate(steps):
        finished = ["0"] if number == len(steps) - 1 else []
        tokens = {name: count for name, count in tokens.items() if name not in finished}
        assert same(*(engine.run(tokens, finished) for engine in (plain, padded))), number
    assert plain.session.coordinator.transfers_of().misses
    assert same(plain.state(), padded.state())
    check_integrity(padded.session.coordinator)


def test_a_dummy_run_changes_nothing():
    """A dummy run comes between steps; its forward is open until the next step, which goes on as
    if there had been none."""
    plain, other = Engine(), Engine()
    for number, tokens in enumerate([{"0": CHUNK, "1": CHUNK}, *[{"0": 1, "1": 1}] * 18]):
        before = other.state()
        other.dummy(1 + number % 4)
        other.dummy(4 - number % 4)
        assert other.session.coordinator.step.slots.tolist() == [-1] * (4 - number % 4)
        assert same(before, other.state())
        assert same(plain.run(tokens), other.run(tokens))
    assert same(plain.state(), other.state())


LIVES = [
    {"0": CHUNK, "1": 33},
    {"0": 1, "1": CHUNK - 34},
    {"0": 1, "1": 1},  # the last of a prompt
    *[{"0": 1, "1": 1}] * 4,
    {"0": 1, "1": 1, "2": CHUNK - 1},
    {"0": 1, "1": 1, "2": 1},  # the last of a prompt, while the first request fills a unit
    *[{"0": 1, "1": 1, "2": 1}] * 9,
]


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_any_order(seed):
    """The runner decides the order anew in each step: a prompt's last token may be between two
    that decode. Longer chunks are behind. Outputs are attention, the kept state is the same."""
    draw = random.Random(seed)

    def shuffled(names):
        single = [name for name in names if tokens[name] == 1]
        draw.shuffle(single)
        orders.add(tuple(single))
        return single + [name for name in names if tokens[name] > 1]

    orders = set()
    plain, other = Engine(**COVERED), Engine(pads=1, order=shuffled, **COVERED)
    for number, tokens in enumerate(LIVES):
        assert same(plain.run(tokens), other.run(tokens)), number
    assert len(orders) > 5
    assert same(plain.state(), other.state())
    assert other.error() < 1e-5
    check_integrity(other.session.coordinator)


@pytest.mark.parametrize("pads", [0, 1])
def test_units_that_steps_fill_are_on_the_host(pads):
    """Some steps only decode: their last layer offloads the units. Other steps have prompts."""
    engine = Engine(pads, **COVERED)
    for tokens in LIVES:
        engine.run(tokens)
    engine.forget_device()
    engine.run(tokens)
    assert engine.error() < 1e-5


def test_dummy_runs_of_prompts_and_before_there_is_a_coordinator_attend_to_nothing():
    assert Session(list, Plain).forward(4, 4) == 0
    assert not Session(list, Plain).prompts()
    engine = Engine()
    assert engine.session.forward(4, 16) == 0
    assert engine.session.coordinator.forward is None


def test_steps_with_prompts_are_kept_apart_from_those_that_decode():
    """A prompt of a token and the last token of a chunked one are prompts, and so is all that a
    request had when it was preempted."""
    engine = Engine()
    for tokens, prompts in [
        ({"0": CHUNK - 1}, True),
        ({"0": 1}, True),
        ({"0": 1}, False),
        ({"0": 1, "1": 1}, True),
        ({"0": 1, "1": CHUNK - 1}, True),
        ({"0": 1, "1": 1}, False),
    ]:
        engine.run(tokens)
        assert engine.prompts == prompts
        assert not engine.session.prompts(), "outside of a step"


def test_an_exception_behind_the_last_layer_drops_the_step():
    engine, beside = Engine(pads=1), Engine(pads=1)
    for tokens in ({"0": CHUNK}, *[{"0": 1}] * 7):  # the next one fills a unit
        assert same(engine.run(tokens), beside.run(tokens))
    execute = engine.execute

    def fail(step):
        execute(step)
        raise ValueError("on purpose")

    engine.execute = fail
    seed = engine.random.get_state()
    with pytest.raises(ValueError, match="on purpose"):
        engine.run({"0": 1})
    engine.execute = execute
    engine.random.set_state(seed)
    assert engine.session.coordinator.forward is None
    assert engine.session.coordinator.length(0) == CHUNK + 7
    for _ in range(3):
        assert same(engine.run({"0": 1}), beside.run({"0": 1}))


def test_device_memory_is_looked_at_before_it_is_taken():
    config, check = lowered(), partial(check_device, requests="max_num_seqs", share="memory")

    def needs(requests):
        return SparseCoordinator.required_bytes(evolve(config, max_requests=requests)).device

    check(config, needs(4))
    with pytest.raises(
        DeviceMemoryError, match=r"of 4 requests .* at most max_num_seqs = 3 would"
    ):
        check(config, needs(4) - 1)
    with pytest.raises(DeviceMemoryError, match="at most max_num_seqs = 1 would"):
        check(config, needs(1))
    with pytest.raises(DeviceMemoryError, match="not even one request fits"):
        check(config, needs(1) - 1)
