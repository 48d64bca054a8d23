"""Session of one worker of an engine: its coordinator and requests, which its parts share.

A session hangs on the worker and on the layers of its model, so that a process may hold several
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topkv import SparseCoordinator
from topkv.config import LoweredConfig
from topkv.types import Index
from topkv_engines.ahead import Ahead
from topkv_engines.counts import Counts
from topkv_engines.graphs import CudaRecorder, RecordedCoordinator, Recorder
from topkv_engines.requests import Requests
from topkv_engines.warm import warm_up


class Session:
    """The session of one worker.

    Args:
        row_names: gives the names of the open step's requests in the order of their rows.
        make: makes the requests of a coordinator, whose ``schedule`` reads the engine's steps.
        ahead: the engine schedules a step before it knows which drafts of the last one it keeps.

    Attributes:
        coordinator, requests, counts: once ``allocate`` has made them.
        ahead: corrects lengths on the device, where the engine is ahead.
    """

    coordinator: RecordedCoordinator
    requests: Requests | None = None
    counts: Counts | None = None
    ahead: Ahead | None = None

    def __init__(
        self,
        row_names: Callable[[], Sequence[Hashable]],
        make: Callable[[SparseCoordinator], Requests],
        ahead: bool = False,
    ) -> None:
        self.row_names, self._make, self._is_ahead = row_names, make, ahead

    def allocate(self, config: LoweredConfig) -> None:
        """Make the coordinator.

        Raises:
            HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
        """
        self.coordinator = RecordedCoordinator(config)
        self.requests = self._make(self.coordinator)
        self.counts = Counts(self.requests)
        self.ahead = Ahead(self.coordinator) if self._is_ahead else None

    def warm_up(self) -> None:
        """Compile kernels now, see ``topkv_engines.warm``; counts of that are not reported."""
        assert self.requests is not None, "allocated"
        assert self.counts is not None, "allocated"
        with torch.inference_mode():
            self.requests.abort()  # padding that a dummy run has left
            warm_up(self.coordinator)
            if self.ahead is not None:
                self.ahead.warm_up()
        self.counts.reset()

    def record(self, sinks: Mapping[int, Tensor | None], recorder: Recorder | None = None) -> None:
        """Record the decode rows of steps with prompts, see ``RecordedCoordinator``.

        Args:
            sinks: that ``attend`` will be given, by layer.
            recorder: records CUDA graphs by default.
        """
        assert self.requests is not None, "allocated"
        assert self.counts is not None, "allocated"
        with torch.inference_mode():
            self.requests.abort()  # padding that a dummy run has left
            self.coordinator.record(sinks, recorder or CudaRecorder())
        self.counts.reset()

    def run(self, step: Any, execute: Callable[[Any], Any]) -> Any:
        """Run a step of the model, which calls ``forward`` and then every layer.

        What is to be settled is settled ahead of it, behind the sampling of the step before:
        requests that the engine has ended by then need it no more.

        Args:
            step: as ``Requests.schedule`` takes it.
            execute: runs the engine's model.
        """
        requests = self.requests
        if requests is None:
            return execute(step)
        with torch.inference_mode():
            requests.abort()  # padding that a dummy run has left
            requests.schedule(step)
            try:
                requests.settle()
                output = execute(step)
                requests.close()
            except BaseException:
                requests.abort()
                raise
        return output

    def prompts(self) -> bool:
        """Return True if the open step has rows of prompts; False outside of a step."""
        return self.requests is not None and self.requests.has_prompts()

    def forward(self, count: int, tokens: int, lengths: Tensor | None = None) -> int:
        """Open the forward of a step, and give its rows; 0 of those that attend to nothing.

        Outside of a step, in dummy runs and where a graph is recorded, as many tokens of each
        request as a step can verify are padding: their forward is opened too, so that a replay
        finds no rows of an earlier step.

        Args:
            count: requests whose rows are there, those of padding included.
            tokens: all rows.
            lengths: int32 ``[count]`` tokens of each request, with those of the step, on the
                device; read by sessions that are ahead alone.
        """
        requests = self.requests
        if requests is None:
            return 0
        if requests.tokens:
            rows = requests.forward(self.row_names()[:count], count)
            if self.ahead is not None and lengths is not None:
                self.ahead.correct(lengths, requests.decoded)
            return rows
        queries = tokens // count
        if tokens % count or queries not in (1, self.coordinator.config.max_queries):
            return 0
        requests.pad(count, queries)
        return tokens

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        index: Index | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer of an open forward, see ``SparseCoordinator.attention``.

        The last layer of a step that only decodes offloads, for a graph of the step holds nothing
        behind its layers.
        """
        coordinator = self.coordinator
        order = self.requests.order if self.requests is not None else None
        if order is None:
            out = coordinator.attention(layer, q, k, v, index, out, sinks)
        else:
            q, k, v = (each.index_select(0, order.taken) for each in (q, k, v))
            index = None if index is None else index.rows(order.taken)
            found = coordinator.attention(layer, q, k, v, index, sinks=sinks)
            out = torch.index_select(found, 0, order.given, out=out)
        forward = coordinator.forward
        if layer == coordinator.model.layers[-1] and forward is not None and not forward.chunks:
            coordinator.offload()
        return out

    def close(self) -> None:
        """Give back the host memory. Idempotent."""
        if self.requests is not None:
            self.requests = self.counts = None
            self.coordinator.close()
