"""Storage of prompt chunks: rows go to their pages, and units are represented."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.layers import Chunk, LayerPath
from topkv.decode.streams import SideStream
from topkv.prompts.history import open_unit
from topkv.requests.requests import Requests
from topkv.types import Index


class ChunkStore:
    """Stores and represents chunks, whoever has attended them. Cold: per request, in Python.

    Args:
        config: dtype and device; on a GPU chunks are stored on a stream of their own.
        requests: lengths and ring bounds.
    """

    def __init__(self, config: LoweredConfig, requests: Requests) -> None:
        self.config, self.requests = config, requests
        self._offload = SideStream(config.device)

    def keep(
        self,
        path: LayerPath,
        chunk: Chunk,
        q: Tensor,
        stored: tuple[Tensor, Tensor],
        lse: Tensor,
        index: Index | None,
    ) -> None:
        """Store one chunk in one layer, and represent it.

        Args:
            q: ``[m, H, D]``.
            stored: keys and values ``[m, Hkv, *]`` as the format of the layer encodes them.
            lse: fp32 ``[m, H]`` of its attention.
            index: of the rows, where the model has an indexer.
        """
        slot, selector = chunk.slot, path.selector
        start = int(self.requests.length[slot])
        if selector is None or selector.selects_prompts:  # which represents before it attends
            self._store(path, slot, start, *stored)
            return
        k, v = path.format.decode(*stored, self.config.model.dtype)
        before_k, before_v = open_unit(path, selector.view.group.unit, slot, start, k.dtype)
        self._store(path, slot, start, *stored)
        if len(before_k):
            k, v = torch.cat([before_k, k]), torch.cat([before_v, v])
        selector.construct(slot, start - len(before_k), k, v, q, lse, index)

    def join(self) -> None:
        """Let the current stream wait for the copies of a forward's chunks."""
        self._offload.join()

    def _store(self, path: LayerPath, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """Send a chunk's keys and values to their pages, on the offload stream of a GPU."""
        high = max(int(self.requests.high[slot]), start + len(k))
        resident = bool(self.requests.resident[slot])
        with self._offload.behind(k, v):
            path.transfer.store_chunk(path.view, slot, start, k, v, high, resident)
