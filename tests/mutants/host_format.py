"""Mutants of host formats: a token is rounded once, so that a unit has one value everywhere, and
no engine gets entries in a form that it does not state."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from attrs import evolve

from tests.machines import scenarios
from tests.mutants.lifecycle import LifecycleMutant, Run
from tests.mutants.transfers import changed, mutant
from topkv import hookimpl
from topkv.config import negotiation
from topkv.entries import PluginEntry
from topkv.errors import ConfigError
from topkv.transfer.triton import TritonTransfer
from topkv_fp8_host_format import entry_kernels, row_kernels
from topkv_fp8_host_format.entry_kernels import Fp8Kernels
from topkv_fp8_host_format.format import Fp8
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.tiers import Tier


def scenario(play: scenarios.Scenario) -> Run:
    """One short life of requests whose host entries are coded."""

    def run(on: Tier) -> None:
        coded = {"host_format": "fp8", "unit": 2, "buffer": 12, "fast": False}
        scenarios.run_scenario(play, on, **coded)

    return run


def run_refusals(on: Tier) -> None:
    """An engine that states the plain form alone gets no other."""
    plain = PluginEntry("plain", "transfer", "topkv.transfer.reference:ReferenceTransfer")
    with pytest.raises(ConfigError, match="takes host_format model, got fp8"):
        make_coordinator(on, "plain", doubles(plain), host_format="fp8")


def decoded_tokens_stay(owner: type) -> Any:
    """The ring, and the buffer as long as it holds a unit, have tokens as the model made them."""
    rounds: Any = vars(owner)["round"]

    @hookimpl
    def round(self, k, v, out=None):
        return (k, v) if out else rounds(self, k, v)

    return round


_round = Fp8.round


@hookimpl
def chunks_stay(self, k, v, out=None):
    """A prompt attends to its rows as the model made them, and to rounded ones before them."""
    return _round(self, k, v, out) if out else (k, v)


def coding_with(old: str = "", new: str = "", **names: Any) -> type:
    """The engine over kernels, whose functions for coded entries have one change."""
    broken = changed(entry_kernels, old, new, **names).CODED_KERNELS

    class Broken(TritonTransfer):
        def __init__(self, setup: Any) -> None:
            host = copy(setup.store.host)
            if setup.store.group.coded_bytes:
                host.kernels = lambda: broken
            super().__init__(evolve(setup, store=evolve(setup.store, host=host)))

    return Broken


class KernelReadsOneExponent(
    coding_with("tl.load(p_exponents, live", "tl.load(p_exponents - at // D, live")
):
    """The kernels that unpack scale every row of an entry as the first one."""


class KernelReadsOneWord(coding_with("tl.load(p_words, live", "tl.load(p_words - at // D, live")):
    """The kernels that unpack give every row of an entry the steps of the first one."""


class KernelPacksTooTight(
    coding_with(encode_rows=changed(row_kernels, "0x1FFFFF", "0x0FFFFF").encode_rows)
):
    """The kernels that pack take the next power too late, and cut the largest elements off."""


CODED = "test_coded_entries_hold_what_was_rounded"
LONG = scenario(scenarios.a_long_request_rolls_back_and_goes_on)
CHUNKS = scenario(scenarios.a_prompt_comes_in_chunks_beside_decode)

MUTANTS = [
    LifecycleMutant(
        "a token is rounded when its unit is evicted, not when it is appended",
        *(Fp8, "round", decoded_tokens_stay(Fp8), LONG),
    ),
    LifecycleMutant(
        "kernels round a token when its unit is evicted, not when it is appended",
        *(Fp8Kernels, "round", decoded_tokens_stay(Fp8Kernels), LONG, ("interpret",)),
    ),
    LifecycleMutant(
        "a chunk is rounded when it is stored, and not for its own attention",
        *(Fp8, "round", chunks_stay, CHUNKS),
    ),
    LifecycleMutant(
        "an engine gets entries in a form that it does not state",
        *(negotiation, "_unless_in", lambda *asked: (), run_refusals),
    ),
    mutant(KernelReadsOneExponent, CODED, "interpret"),
    mutant(KernelReadsOneWord, CODED, "interpret"),
    mutant(KernelPacksTooTight, CODED, "interpret"),
]
