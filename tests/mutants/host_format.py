"""Mutants of the rule that a token is rounded once, so that a unit has one value everywhere."""

from __future__ import annotations

from tests.mutants.lifecycle import LifecycleMutant, Run
from topkv.kv.token_format import TokenFormat
from topkv_testing.machines import scenarios
from topkv_testing.tiers import Tier


def scenario(play: scenarios.Scenario) -> Run:
    """One short life of requests whose host entries are coded."""

    def run(on: Tier) -> None:
        coded = {"host_format": "fp8", "unit": 2, "buffer": 12, "fast": False}
        scenarios.run_scenario(play, on, **coded)

    return run


_round = TokenFormat.round


def decoded_tokens_stay(self, k, v, out=None):
    """The ring, and the buffer as long as it holds a unit, have tokens as the model made them."""
    return (k, v) if out else _round(self, k, v)


def chunks_stay(self, k, v, out=None):
    """A prompt attends to its rows as the model made them, and to rounded ones before them."""
    return _round(self, k, v, out) if out else (k, v)


LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
CHUNKS = scenario(scenarios.a_prompt_comes_in_chunks_beside_decode)

MUTANTS = [
    LifecycleMutant(
        "a token is rounded when its unit is evicted, not when it is appended",
        *(TokenFormat, "round", decoded_tokens_stay, LONG, ("cpu", "interpret")),
    ),
    LifecycleMutant(
        "a chunk is rounded when it is stored, and not for its own attention",
        *(TokenFormat, "round", chunks_stay, CHUNKS),
    ),
]
