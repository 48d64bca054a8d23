"""Whole lives of requests, recorded and replayed: every count is the coordinator's, to the last.

The state machine of the core begins, prefills, decodes, drops, rolls back, truncates, forks and
ends requests in any order, in groups of different units. The counts that are compared with are
those of ``ReferenceTransfer.plan``.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines.lifecycle import lifecycle_machine
from tests.machines.scenarios import SCENARIOS, run_scenario
from topkv_simulate.policies import BELADY, LRU
from topkv_simulate.recorder import recording
from topkv_simulate.replay import Replayer
from topkv_testing.kit import examples
from topkv_testing.tiers import tier

CPU = tier("cpu")


def recorded_machine(*args, **options):
    """The lifecycle machine, recorded; when it ends its trace is replayed."""

    class Recorded(lifecycle_machine(*args, **options)):
        def set_up(self, *args, **options):
            options |= {"verification": "joint"}  # exact ones are refused
            options |= {"max_queries": 1} if options["stages"] else {}
            super().set_up(*args, **options)
            self.open = recording(self.coordinator)
            self.recorder = self.open.__enter__()
            self.engines = list(self.coordinator.transfers)

        def teardown(self):
            if not hasattr(self, "recorder"):
                return
            self.coordinator.forward_abort()
            reported = (
                self.coordinator.transfers_of()
            )  # of ended requests and dropped forwards, too
            self.open.__exit__(None, None, None)
            check(self.recorder.trace(), reported)
            super().teardown()

    return Recorded


def check(trace, reported):
    replayer = Replayer(trace)
    replayer.check()
    slots = [group.geometry.buffer_slots for group in trace.groups]
    found = replayer.run(slots, LRU)
    assert sum(int(each.hits.sum()) for each in found) == reported.hits
    assert sum(int(each.misses.sum()) for each in found) == reported.misses
    for larger in (0, 1, 5):
        sizes = [count + larger for count in slots]
        lru, best = (replayer.run(sizes, policy) for policy in (LRU, BELADY))
        for one, other in zip(lru, best, strict=True):
            assert (one.misses.sum(0) >= other.misses.sum(0)).all()
            assert np.array_equal(one.hits + one.misses, other.hits + other.misses)


def test_lives_replay_exactly():
    few = settings(examples(CPU, cpu=15, interpret=1, gpu=1), stateful_step_count=20)
    run_state_machine_as_test(recorded_machine(CPU), settings=few)


@pytest.mark.parametrize("fast", [True, False], ids=["resident", "by order"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenarios_replay_exactly(scenario, fast):
    run_scenario(scenario, CPU, make=recorded_machine, fast=fast, unit=2, buffer=12)
