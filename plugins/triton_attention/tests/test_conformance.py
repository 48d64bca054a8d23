"""The conformance kit on this backend."""

from __future__ import annotations

import pytest
import torch

from topkv_testing.backend.bench import BackendOptions
from topkv_testing.backends import BackendTests
from topkv_testing.kit import subject_of
from topkv_testing.tiers import Tier
from topkv_triton_attention.backend import HEAD_DIMS

# The entry states no head dims, because those of latent rows are others.
OPTIONS = BackendOptions(dims=HEAD_DIMS)


class TestTritonAttention(BackendTests):
    @pytest.fixture
    def plugin(self):
        return "triton_attention"

    @pytest.fixture
    def options(self):
        return OPTIONS


@pytest.mark.gpu
@pytest.mark.parametrize(
    "test",
    [
        "test_attends_to_the_listed_tokens",
        "test_an_empty_lane_gives_zero_and_minus_infinity",
        "test_table_follows_the_formula",
        "test_wide_tables",
        "test_adapted_table_attends_to_selection_and_tail",
        "test_prefill_of_a_chunk_over_itself_is_causal",
        "test_prefill_over_history_sees_what_is_before",
        "test_graph_replay_follows_its_inputs",
    ],
)
def test_the_reference_runs_on_a_device_too(test):
    tier = Tier("gpu", "reference", torch.device("cuda"), None)
    getattr(BackendTests(), test)(subject_of("triton_attention", "backend", tier, OPTIONS))
