"""A stand-in for the functions of ``torch.cuda.nvtx``, which CPU builds of torch lack."""

from __future__ import annotations

import pytest
from torch.cuda import nvtx


class Timeline:
    """Ranges as a profiler would see them.

    Attributes:
        texts: of all ranges that were started, by their number.
        open: numbers of those that have not ended, in order.
    """

    def __init__(self):
        self.texts, self.open = {}, []

    def start(self, text):
        number = len(self.texts) + 1
        self.texts[number] = text
        self.open.append(number)
        return number

    def end(self, number):
        self.open.remove(number)


@pytest.fixture
def timeline(monkeypatch):
    """Ranges that were started while the test ran."""
    timeline = Timeline()
    monkeypatch.setattr(nvtx, "mark", lambda text: None)
    monkeypatch.setattr(nvtx, "range_start", timeline.start)
    monkeypatch.setattr(nvtx, "range_end", timeline.end)
    return timeline
