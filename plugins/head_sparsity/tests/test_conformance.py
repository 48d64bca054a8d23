"""Head sparsity against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv.testing.stages import AlgorithmOptions, StageTests
from topkv_head_sparsity.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "threshold": st.sampled_from([0.7, 0.3, 0.9, 1.0]),
            "head_budget": st.sampled_from([0.25, 0.5, 1.0]),
        }
    ),
    selects=(2, 3, 5),
)


class TestHeadSparsity(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
