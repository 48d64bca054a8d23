"""Prefill: a chunk over history that is streamed block by block and over itself, merged by LSE."""

from __future__ import annotations

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
        """Attend, store and represent one chunk in one layer.

        Args:
            q: ``[m, H, D]``.
            k, v: ``[m, Hkv, D]``.
            index: of the rows, where the model has an indexer.
            out: ``[m, H, Dv]``.
            sinks: fp32 ``[H]``, see ``SparseCoordinator.attention``.
        """
        slot, selector, dtype = chunk.slot, path.selector, self.config.model.dtype
        start, chosen, before = int(self.requests.length[slot]), None, None
        # The stored rows are attended, so that chunks of any size give the same.
        stored = path.format.pack(*path.host.round(k, v))
        if selector and selector.selects_prompts:
            own = path.format.unpack(*stored, dtype)
            chosen = selector.select_prompt(slot, start, q, *own, index)
        elif isinstance(selector, Own):
            before = open_unit(path, selector.view.group.unit, slot, start, dtype)
        self._store(path, slot, start, *stored)
        blocks = self.ahead.blocks(path, slot, start, *stored)
        lse = chunk_attention(path.backend, q, start, blocks, out, chosen)
        if isinstance(selector, Own) and before is not None:  # of others it is there already
            k, v = path.format.unpack(*stored, dtype)
            if opened := len(before[0]):
                k, v = (torch.cat(each) for each in zip(before, (k, v), strict=True))
            selector.construct(slot, start - opened, k, v, q, lse, index)
        if sinks is not None:
            add_sinks(out, lse, sinks)

    def _store(self, path: LayerPath, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """Send a chunk's keys and values to their pages, on the offload stream of a GPU.

        They go while the chunk attends: that kernel gives its work to what processors are free,
        and the products behind it wait for the last one.
        """
        high = max(int(self.requests.high[slot]), start + len(k))
        resident = bool(self.requests.resident[slot])
        with self._offload.behind(k, v):
            path.transfer.store_chunk(path.view, slot, start, k, v, high, resident)

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
