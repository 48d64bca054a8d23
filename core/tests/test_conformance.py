"""Plugins of the core and doubles of the kit, under the suites of their kinds."""

from __future__ import annotations

import pytest

from topkv.entries import Capabilities, PluginEntry
from topkv.ops.topk import topk
from topkv.plugins.discovery import hookimpl
from topkv_testing.evictions import EvictionTests
from topkv_testing.topks import TopKOptions, TopKTests
from topkv_testing.transfers import TransferTests


class TestZeroCopy(TransferTests):
    @pytest.fixture
    def plugin(self):
        return "zero_copy"


class TestLeastRecentlyUsed(EvictionTests):
    @pytest.fixture
    def plugin(self):
        return "lru"


class TestRadixTopK(TopKTests):
    @pytest.fixture
    def plugin(self):
        return "radix"

    @pytest.fixture
    def options(self):
        """At the edges of the blocks that hold a row in registers, and beyond."""
        return TopKOptions(widths=(2048, 2049, 16384, 16385, 70000), selects=(1, 1500, 9000))


class SortedTopK:
    """The formula that algorithms select by where they are references."""

    def __init__(self, setup):
        """Nothing depends on the setup."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        topk(scores, lengths, ids, impl="reference")


class TestSortedTopK(TopKTests):
    @pytest.fixture
    def plugin(self):
        what = Capabilities(capture=False, tiers=("cpu", "gpu"))
        return PluginEntry("sorted", "topk", f"{__name__}:SortedTopK", capabilities=what)
