"""Requests that give pages back, and configurations that may not."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests.machines.dropping import (
    EVERY,
    OPTIONS,
    PAGE,
    STAGE,
    TOKENS,
    Lives,
    run_dropping,
)
from topkv.errors import ConfigError
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.models.stage_doubles import HEAVY
from topkv_testing.stages import AlgorithmOptions, StageTests
from topkv_testing.tiers import tier


class TestHeavy(StageTests):
    """The stage that these tests use, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(HEAVY, name="weighty")

    @pytest.fixture
    def options(self):
        return AlgorithmOptions()


def test_lives_attend_to_what_is_left(on):
    run_dropping(on)


def test_pages_of_a_long_answer_stay_bounded():
    lives = Lives(tier("cpu"))
    slot = lives.begin()
    lives.forward({slot: 30}, decode=False)
    for _ in range(80):
        lives.forward({slot: 1}, decode=True)
        assert lives.coordinator.manager.host.used <= -(-(TOKENS + EVERY) // PAGE) + 1
    assert lives.dropped[slot] >= 30 + 80 - TOKENS - EVERY
    lives.close()


def test_what_stays_behind_the_last_page_that_went_is_known():
    """An engine that counts by true positions can cut down to these tokens."""
    lives = Lives(tier("cpu"))
    requests, slot = lives.coordinator.requests, lives.begin()
    lives.forward({slot: 30}, decode=False)
    true = torch.arange(30)
    for step in range(40):
        before = lives.left[slot][0, 0, :, 0, 0].clone()
        lives.forward({slot: 1}, decode=True)
        after = lives.left[slot][0, 0, :, 0, 0]
        stayed = [int((before == value).nonzero()) for value in after[:-1]]
        true = torch.cat([true[stayed], torch.tensor([30 + step])])
        firm = int(requests.firm[slot])
        behind = true[firm:]
        assert torch.equal(behind, torch.arange(len(true))[firm:] + int(requests.dropped[slot]))
        gone = {*range(31 + step)} - {*true.tolist()}
        assert firm == sum(1 for each in true.tolist() if each < max(gone, default=-1))
    lives.close()


def test_a_twin_keeps_the_pages_that_the_other_one_gives_back():
    lives = Lives(tier("cpu"))
    slot = lives.begin()
    lives.forward({slot: 18}, decode=False)
    twin = lives.coordinator.fork(slot)
    lives.left[twin], lives.dropped[twin] = lives.left[slot], 0
    for _ in range(6):
        lives.forward({slot: 1}, decode=True)
    assert lives.dropped[slot] > 0
    lives.check()
    lives.forward({twin: 1}, decode=True)
    lives.close()


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        make_coordinator(tier("cpu"), **OPTIONS | options)
    return str(caught.value)


def test_what_is_refused():
    assert "here they are an engine's" in refused(pages="engine")
    reported = refused(algorithm="scripted")
    assert "uses the old numbers (settle, pool 'turns')" in reported
    twice = [STAGE, STAGE]
    assert "the stages [0, 1] all say which pages stay" in refused(stages=twice)
    other = {"3": {"stages": [STAGE | {"params": STAGE["params"] | {"tokens": 20}}]}}
    layers = {"1": "resident", "2": "streamed"} | other
    assert "stages ask for different things" in refused(layers=layers)
    few = [STAGE | {"params": STAGE["params"] | {"tokens": 15, "first": 3}}]
    assert "tokens must be at least 16" in refused(stages=few)


def test_all_reasons_are_named_at_once():
    reported = refused(pages="engine", algorithm="scripted", stages=[STAGE, STAGE])
    for part in ("an engine's", "uses the old numbers", "the stages [0, 1] all say"):
        assert part in reported, reported


def test_who_generates_sees_how_long_a_request_gets():
    """Room for more has not to be reserved; without such a stage there is no bound."""
    for stages, bound in ((OPTIONS["stages"], TOKENS + EVERY), ([], None)):
        coordinator = make_coordinator(tier("cpu"), **OPTIONS | {"stages": stages})
        assert coordinator.requests.bound == bound
        assert len(coordinator.before_lease) == (bound is not None)
        coordinator.close()


def test_one_stage_gives_back_the_pages_of_all_groups():
    """Layers of two groups are scored, and pages go once."""
    layers = {"1": "resident", "2": "streamed", "3": {"unit": 1}}
    lives = Lives(tier("cpu"), layers=layers)
    assert len({id(path.algorithm) for path in lives.coordinator.layers if path.selector}) == 2
    assert len(lives.coordinator.before_lease) == 1
    slot = lives.begin()
    lives.forward({slot: 30}, decode=False)
    for _ in range(8):
        lives.forward({slot: 1}, decode=True)
    assert lives.dropped[slot] > 0
    lives.close()
