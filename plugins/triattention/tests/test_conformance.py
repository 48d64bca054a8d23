"""TriAttention against the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from topkv.testing.stages import AlgorithmOptions, StageTests
from topkv_triattention.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()

QUERIES = Path(__file__).parent / "queries.json"
"""A calibration of one layer of 4 heads of 12 channels, of which 8 are turned, in halves."""

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {"calibration": st.just(str(QUERIES)), "tokens": st.sampled_from([16, 4096])}
    ),
    geometry={"kv_heads": (2,), "groups": (2,), "dims": (12,)},
    selects=(2, 3, 5),
)


class TestTriAttention(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
