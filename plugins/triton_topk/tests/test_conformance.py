"""The conformance kit on this top-k."""

from __future__ import annotations

import pytest

from topkv_testing.topks import TopKOptions, TopKTests


class TestPivotTopK(TopKTests):
    @pytest.fixture
    def plugin(self):
        return "pivot"

    @pytest.fixture
    def options(self):
        """Rows of the core's kernels, rows whose candidates fit a block, and K that fits none."""
        return TopKOptions(widths=(4000, 20000, 70000), selects=(1, 2048, 39999))
