"""Prefill: a chunk over history that is streamed block by block and over itself, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.layers import Chunk, LayerPath
from topkv.decode.selectors import Own
from topkv.decode.streams import SideStream
from topkv.ops.chunk_attention import add_sinks, chunk_attention
from topkv.prompts.ahead import HistoryAhead
from topkv.prompts.history import StoredHistory, open_unit
from topkv.requests.requests import Requests
from topkv.types import Index

Represent = Callable[[Tensor, Tensor, Index | None], None]
"""Represents a chunk by its queries ``[m, H, D]``, their LSE, fp32 ``[m, H]``, and their index."""


class Prefill:
    """Runs prompt chunks and settles requests. Cold: per request, in Python.

    On a GPU history is fetched ahead on one stream, and chunks are stored on another.

    Args:
        config: blocks and device.
        requests: lengths and ring bounds.
        paths: of all layers, in order.

    Attributes:
        ahead: fetches the history of a forward's chunks.
    """

    def __init__(self, config: LoweredConfig, requests: Requests, paths: list[LayerPath]) -> None:
        self.config, self.requests = config, requests
        self.ahead = HistoryAhead(config, requests, paths)
        self._offload = SideStream(config.device)

    def run(
        self,
        path: LayerPath,
        chunk: Chunk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Index | None,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Store, attend and represent one chunk in one layer.

        Args:
            q: ``[m, H, D]``.
            k, v: ``[m, Hkv, D]``.
            index: of the rows, where the model has an indexer.
            out: ``[m, H, Dv]``.
            sinks: fp32 ``[H]``, see ``SparseCoordinator.attention``.
        """
        slot, selector, chosen = chunk.slot, path.selector, None
        start = int(self.requests.length[slot])
        # The stored rows are attended, so that chunks of any size give the same.
        stored = path.format.pack(*path.host.round(k, v))
        if selector and selector.selects_prompts:
            own = path.format.unpack(*stored, self.config.model.dtype)
            chosen = selector.select_prompt(slot, start, q, *own, index)
        represent = self.store(path, chunk, *stored)
        blocks = self.ahead.blocks(path, slot, start, *stored)
        lse = chunk_attention(path.backend, q, start, blocks, out, chosen)
        represent(q, lse, index)
        if sinks is not None:
            add_sinks(out, lse, sinks)

    def store(self, path: LayerPath, chunk: Chunk, k: Tensor, v: Tensor) -> Represent:
        """Send a chunk to its pages while it attends; return what represents it afterwards.

        On a GPU the copy has a stream of its own and runs beside the attention of the chunk, whose
        work goes to the processors that the copy leaves free. A product behind it would wait.

        Args:
            k, v: ``[m, Hkv, *]`` as the format of the layer encodes them.
        """
        slot, selector, dtype = chunk.slot, path.selector, self.config.model.dtype
        start, construct = int(self.requests.length[slot]), None
        if isinstance(selector, Own) and not selector.selects_prompts:
            construct = selector.construct
            before = open_unit(path, selector.view.group.unit, slot, start, dtype)
        high = max(int(self.requests.high[slot]), start + len(k))
        resident = bool(self.requests.resident[slot])
        with self._offload.behind(k, v):
            path.transfer.store_chunk(path.view, slot, start, k, v, high, resident)

        def represent(q: Tensor, lse: Tensor, index: Index | None) -> None:
            if construct is None:  # nothing keeps it, or select_prompt has
                return
            rows = path.format.unpack(k, v, dtype)
            if opened := len(before[0]):
                rows = torch.cat([before[0], rows[0]]), torch.cat([before[1], rows[1]])
            construct(slot, start - opened, *rows, q, lse, index)

        return represent

    def settle(self, path: LayerPath, slot: int, since: int, length: int) -> None:
        """Call ``settle`` of a layer that selects for itself, with the history that it asks for.

        Args:
            since: first position that no settle has seen.
            length: tokens of the request.
        """
        selector, config = path.selector, self.config
        if isinstance(selector, Own) and selector.settles:
            whole, unit = selector.settle_whole, selector.view.group.unit
            first = 0 if whole else since - since % unit
            sizes = (config.prefill_block_tokens, config.model.dtype, config.device)
            selector.settle(slot, since, length, StoredHistory(path, slot, first, length, *sizes))

    def join(self) -> None:
        """Let the current stream wait for the copies of a forward's chunks."""
        self._offload.join()
        self.ahead.end()
