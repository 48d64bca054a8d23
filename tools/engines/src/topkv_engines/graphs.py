"""Graphs of single layers, for the decode rows of steps that read prompts too.

An engine replays a step that only decodes as one graph. Prompts are read in Python, a dozen
launches a layer, and as many more for the rows that decode beside them: on the host of an H200
they took 1.4 ms a layer, and the device waited. So those rows have a graph in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv import SparseCoordinator
from topkv.config import LoweredConfig
from topkv.decode.layers import Forward, LayerPath
from topkv.types import Index, ModelShape

Recorder = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Records a body and returns what replays it. Recording runs nothing."""


class CudaRecorder:
    """Records CUDA graphs that share the memory of what is needed within one of them alone."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """See ``Recorder``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
            body()
        return graph.replay


@frozen
class LayerRows:
    """Inputs and output of a layer for some rows.

    Attributes:
        q, k, v, index: as of ``SparseCoordinator.attention``.
        out: ``[rows, H, out_dim]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index: Index | None
    out: Tensor

    @classmethod
    def random(cls, model: ModelShape, layer: int, rows: int, device: torch.device) -> LayerRows:
        """Make rows of a layer, with random numbers."""

        def made(*shape: int) -> Tensor:
            return torch.randn((rows, *shape), dtype=model.dtype, device=device)

        k, v = (made(model.num_kv_heads, model.head_dim) for _ in range(2))
        index, indexer = None, model.indexer
        if indexer is not None and indexer.selects_for(layer):
            heads, size = indexer.num_heads, indexer.head_dim
            index = Index(made(heads, size), made(size), made(heads).float())
        q, out = made(model.num_heads, model.head_dim), made(model.num_heads, model.out_dim)
        return cls(q, k, k if model.attention == "mla" else v, index, out)

    def take(self, count: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy the first rows of these, of a layer without an index. Hot."""
        for mine, theirs in ((self.q, q), (self.k, k), (self.v, v)):
            mine[:count].copy_(theirs[:count])


class RecordedCoordinator(SparseCoordinator):
    """A coordinator that replays the decode rows of steps with prompts, once it has recorded them.

    Args:
        config: as of ``SparseCoordinator``.
    """

    def __init__(self, config: LoweredConfig) -> None:
        self._graphs: dict[tuple[int, int, int], Callable[[], Any]] = {}
        self._rows: LayerRows | None = None
        self._sinks: Mapping[int, Tensor | None] = {}
        super().__init__(config)

    def record(self, sinks: Mapping[int, Tensor | None], recorder: Recorder) -> None:
        """Record the decode rows of each layer, for numbers of requests that are powers of two,
        and of one query or all that a row can have. Between forwards.

        Nothing is recorded where layers share a selection, whose loads run on beside the layers
        that follow, where the model has an indexer, and where a plugin states that it cannot be
        captured.

        Args:
            sinks: of each layer, as it will be called with.
            recorder: records a body.
        """
        config, model, most = self.config, self.model, self.config.max_requests
        shared = any(len(turn) > 1 for group in config.groups for turn in group.turns)
        if shared or model.indexer is not None or not config.capturable:
            return
        room, self._sinks = most * config.max_queries, sinks
        # Layers run one after the other, so that one copy of rows serves them all.
        self._rows = LayerRows.random(model, model.layers[0], room, config.device)
        sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)}
        for queries in sorted({1, config.max_queries}):
            for size in sorted(sizes, reverse=True):  # the largest first: others fit its memory
                self._record(self._rows, size, queries, recorder)

    def _record(self, rows: LayerRows, size: int, queries: int, recorder: Recorder) -> None:
        self.forward_begin([-1] * size, queries=queries)
        forward = self.forward
        assert forward is not None, "begun"
        try:
            for path in self.layers:
                layer = path.view.layer
                inputs = (rows.q, rows.k, rows.v, None, rows.out, self._sinks.get(layer))
                body = partial(super().decode_rows, path, forward, *inputs)
                body()  # compiles, and sets libraries up
                self._graphs[layer, size, queries] = recorder(body)
        finally:
            self.forward_abort()

    def decode_rows(
        self,
        path: LayerPath,
        forward: Forward,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Index | None,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """See ``SparseCoordinator``: in a step with prompts a replay, where there is one. Rows of
        padding are behind those of the step, as every upload leaves them."""
        rows, count = self._rows, forward.decoded
        replay = self._replay(path.view.layer, forward, sinks)
        if replay is None or rows is None:
            super().decode_rows(path, forward, q, k, v, index, out, sinks)
            return
        rows.take(count, q, k, v)
        replay()
        out[:count].copy_(rows.out[:count])

    def _replay(
        self, layer: int, forward: Forward, sinks: Tensor | None
    ) -> Callable[[], Any] | None:
        """Return the replay of a layer's decode rows in a forward; None if there is none."""
        if not forward.chunks or sinks is not self._sinks.get(layer):
            return None
        size = min(1 << (len(forward.rows) - 1).bit_length(), self.config.max_requests)
        return self._graphs.get((layer, size, forward.queries))

    def close(self) -> None:
        """See ``SparseCoordinator``; the graphs are let go of before what they write to."""
        self._graphs.clear()
        self._rows = None
        super().close()
