"""KeyDiff against the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv.testing.stages import AlgorithmOptions, StageTests
from topkv_keydiff.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries({"tokens": st.sampled_from([16, 4096])}), selects=(2, 3, 5)
)


class TestKeyDiff(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
