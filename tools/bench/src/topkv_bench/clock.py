"""Clock of the steps of ``generate``, which looks where a token goes to the streamer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """Takes the time of every token. ``generate`` has its tokens on the host by then, so that the
    device has done the step.

    Args:
        warmup: decode steps that are not counted.
        steps: counted decode steps behind them.
        marks: functions by the number of decode steps after which each is called; their time is
            not counted.

    Attributes:
        first: seconds from the start to the first token; NaN before it.
        seconds: seconds of each counted step.
    """

    def __init__(self, warmup: int, steps: int, marks: Mapping[int, Callable[[], Any]]) -> None:
        self._counted = range(warmup + 1, warmup + steps + 1)
        self._marks = marks
        self._done = -2  # of two calls before the first step the first brings the prompt
        self.first, self.seconds = float("nan"), list[float]()
        self._last = 0.0

    def start(self) -> None:
        """Note the time: ``generate`` is about to be called."""
        self._last = perf_counter()

    def put(self, value: Any) -> None:
        passed = perf_counter() - self._last
        self._done += 1
        if self._done == -1:
            return
        if self._done == 0:
            self.first = passed
        elif self._done in self._counted:
            self.seconds.append(passed)
        if self._done in self._marks:
            self._marks[self._done]()
        self._last = perf_counter()

    @property
    def done(self) -> bool:
        """True once every counted step is over."""
        return len(self.seconds) == len(self._counted)

    def end(self) -> None:
        """Do nothing at the end of a stream."""

    def milliseconds(self) -> dict[str, float]:
        """See ``milliseconds``, of the counted steps."""
        return milliseconds(self.seconds)


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile of steps."""
    low, median, high = np.percentile(seconds, (10, 50, 90)) * 1e3
    return {"median": float(median), "p10": float(low), "p90": float(high)}
