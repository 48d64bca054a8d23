"""A stream beside the current one, and marks by which streams wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

URGENT = -1
"""Priority of a stream whose work starts before what other streams have queued already."""


class SideStream:
    """Device work that runs beside the current stream's. The host never waits for it.

    On a CPU everything is done when it is called, and there is nothing to wait for.

    Args:
        device: where the work runs.
        priority: 0, or ``URGENT``.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self._stream = device, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)

    @contextmanager
    def behind(self, *tensors: Tensor) -> Iterator[None]:
        """Queue the work of this context behind all that the current stream was given.

        Args:
            tensors: tensors that are read within and may be let go of afterwards.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in tensors:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):  # without one this changes nothing
            yield

    def event(self) -> torch.cuda.Event | None:
        """Make an event for ``mark``, where marks are made again and again; None on a CPU."""
        return None if self._stream is None else torch.cuda.Event()

    def mark(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Mark all that was queued so far, for ``join``; in the caller's event, or a new one."""
        return None if self._stream is None else self._stream.record_event(event)

    def join(self, mark: torch.cuda.Event | None = None) -> None:
        """Let the current stream wait for a mark, or for all that was queued."""
        if self._stream is not None:
            mark = mark or self._stream.record_event()
            torch.cuda.current_stream(self.device).wait_event(mark)
