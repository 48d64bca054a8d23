"""Double Sparsity against the conformance kit: channels of a prompt, and of a file."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import strategies as st

from topkv_double_sparsity.entry import topkv_register_algorithms
from topkv_testing.algorithm.kernels import KernelTests
from topkv_testing.algorithm.state import StateTests
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests

(ENTRY,) = topkv_register_algorithms()


def sinks(length, bench):
    """The first ``sink_tokens`` of the selectable tokens, as they were asked for."""
    asked = bench.params
    return set(range(min(asked.sink_tokens, length - 1)))


def options(params, **further):
    """Options with these strategies of parameters beside those of every class."""
    drawn = {"label": st.sampled_from(["bf16", "int4"]), "sink_tokens": st.integers(0, 2)}
    return AlgorithmOptions(
        params=st.fixed_dictionaries(drawn | params),
        promised=sinks,
        selects=(2, 3, 5),
        units=9,
        hidden_needles=True,
        head_needles=True,
        **further,
    )


class TestChannelsOfThePrompt(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "double_sparsity"

    @pytest.fixture
    def options(self):
        return options({})


class TestChannelsOfAFile(StateTests, KernelTests):
    """A label depends on its key alone where a file has the channels: the kit's tests of that."""

    kind = "algorithm"

    @pytest.fixture
    def plugin(self):
        traits = ("attends", "nested", "low_ties", "exact_update", "incremental")
        capabilities = attrs.evolve(ENTRY.capabilities, traits=traits)
        return attrs.evolve(ENTRY, capabilities=capabilities)

    @pytest.fixture
    def options(self, tmp_path):
        rows = [[(7 * channel + 5 * head) % 12 for channel in range(12)] for head in range(2)]
        path = tmp_path / "channels.json"
        content = {"format": "topkv-double-sparsity-1", "kind": "importance"}
        path.write_text(json.dumps({**content, "layers": {"0": rows}}))
        params = {"calibration": st.just(str(path)), "channels": st.sampled_from([1, 3, 8, 12])}
        return options(params, geometry={"kv_heads": (2,), "dims": (12,)})
