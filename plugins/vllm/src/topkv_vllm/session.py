"""What the parts of one worker share: its layers, coordinator and requests.

It hangs on the worker and on the layers of its model, so that a process may hold several engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from topkv import SparseCoordinator
from topkv.config import LoweredConfig
from topkv_vllm.counts import Counts
from topkv_vllm.requests import Requests


class Session:
    """One worker's.

    Args:
        row_names: gives the request ids of the open step in the order of their rows.

    Attributes:
        coordinator, requests, counts: once ``allocate`` has made them.
    """

    coordinator: SparseCoordinator
    requests: Requests | None = None
    counts: Counts | None = None

    def __init__(self, row_names: Callable[[], Sequence[str]]) -> None:
        self.row_names = row_names

    def allocate(self, config: LoweredConfig) -> None:
        """Make the coordinator.

        Raises:
            HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
        """
        self.coordinator = SparseCoordinator(config)
        self.requests = Requests(self.coordinator)
        self.counts = Counts(self.requests)

    def run(self, step: Any, execute: Callable[[Any], Any]) -> Any:
        """Run a step of the model, which calls ``forward`` and then every layer.

        Args:
            step: vLLM's ``SchedulerOutput``.
            execute: the worker's own ``execute_model``.
        """
        requests = self.requests
        if requests is None:
            return execute(step)
        with torch.inference_mode():
            requests.schedule(step)
            try:
                output = execute(step)
                requests.close()
            except BaseException:
                requests.abort()
                raise
        return output

    def forward(self, count: int) -> int:
        """Open the forward of a step, and give its rows; 0 outside of a step, in dummy runs.

        Args:
            count: requests whose rows are there.
        """
        if self.requests is None or not self.requests.tokens:
            return 0
        return self.requests.forward(self.row_names()[:count])

    def close(self) -> None:
        """Give back the host memory. Idempotent."""
        if self.requests is not None:
            self.requests = self.counts = None
            self.coordinator.close()
