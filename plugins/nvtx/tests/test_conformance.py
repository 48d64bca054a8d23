"""The observer against the conformance kit."""

from __future__ import annotations

import pytest

from topkv_testing.observers import ObserverOptions, ObserverTests


def expected(reported):
    """The range that is open: that of the last forward, if it was dropped."""
    last = reported[-1]
    rows = sum(slot >= 0 for slot in last.slots)
    text = f"topkv: {rows} decode rows, {last.prompt_tokens} prompt tokens"
    return [] if last.ended else [text]


class TestNvtx(ObserverTests):
    @pytest.fixture
    def plugin(self):
        return "nvtx"

    @pytest.fixture
    def options(self, timeline):
        def says(observer):
            return [timeline.texts[number] for number in timeline.open if number == observer.open]

        return ObserverOptions(says=says, oracle=expected)
