"""The observer against the conformance kit."""

from __future__ import annotations

import pytest

from topkv_testing.observers import ObserverOptions, ObserverTests


def waited(observer):
    """Layers that have waited, in order."""
    return [layer for layer, spent in observer.milliseconds().items() if spent > 0]


def missed(reported):
    """Layers that have loaded something, warm starts and dropped forwards included."""
    return [layer for layer, counts in reported[-1].totals.layers.items() if counts.misses]


class TestStalls(ObserverTests):
    @pytest.fixture
    def plugin(self):
        return "stalls"

    @pytest.fixture
    def options(self):
        return ObserverOptions(says=waited, oracle=missed)
