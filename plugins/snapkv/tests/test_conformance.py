"""SnapKV against the conformance kit."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import strategies as st

from topkv.testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_snapkv.entry import topkv_register_algorithms


def window(length, bench):
    """The last tokens of a prompt, less the newest, which the core appends."""
    params = {**bench.subject.entry.parameters, **bench.case.params}
    return set(range(max(length - params["window"], 0), length - 1))


PARAMS = {
    "window": st.sampled_from([1, 3, 4]),
    "kernel": st.sampled_from([1, 3]),
    "pool": st.sampled_from(["max", "avg"]),
    "generated": st.integers(3, 4),
    "outgrow": st.sampled_from(["refuse", "slide"]),
}

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(PARAMS), promised=window, selects=(9, 11, 14), units=32
)


class TestSnapKV(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "snapkv"

    @pytest.fixture
    def options(self):
        return OPTIONS


class TestAda(AlgorithmTests):
    """Heads that compete for places: of equal votes the lower head wins, so no head is alike."""

    @pytest.fixture
    def plugin(self):
        entry = topkv_register_algorithms()[0]
        capabilities = evolve(
            entry.capabilities, scopes=("kv_head",), traits=("scale_free",), tiers=("cpu", "gpu")
        )
        return evolve(entry, capabilities=capabilities)

    @pytest.fixture
    def options(self):
        ada = {"ada": st.just(True), "ada_max": st.sampled_from([1, 1.5])}
        geometry = {"kv_heads": (2, 3)}
        return evolve(
            OPTIONS,
            params=st.fixed_dictionaries({**PARAMS, **ada}),
            selects=(12, 15),
            geometry=geometry,
        )
