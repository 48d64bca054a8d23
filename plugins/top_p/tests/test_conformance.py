"""Top-p against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv.testing.stages import AlgorithmOptions, StageTests
from topkv_top_p.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "p": st.sampled_from([0.85, 0.3, 0.95, 1.0]),
            "widen": st.sampled_from([1, 3, 2]),
            "outliers": st.integers(1, 4),
        }
    ),
    selects=(2, 3, 5),
)


class TestTopP(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
