"""Dense prefill: a chunk over itself and over history streamed block by block, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from attrs import frozen
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.layers import Chunk, LayerPath
from topkv.ops.chunk_attention import add_sinks, chunk_attention
from topkv.requests import Requests
from topkv.types import Index


def history_blocks(
    path: LayerPath,
    slot: int,
    start: int,
    end: int,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Stream positions ``start .. end`` from their pages, ``block`` tokens at a time.

    Args:
        start: on a boundary of the layer's units.
        block: a multiple of the page.
        dtype: of the model, which packed rows are decoded to.

    Yields:
        ``(position, k, v)`` with ``[n, Hkv, D]`` tensors that the caller may keep.
    """
    layer, group = path.view, path.view.group
    for first in range(start, end, block):
        shape = (min(block, end - first), group.num_kv_heads, group.head_dim)
        k = torch.empty(shape, dtype=group.dtype, device=device)
        v = torch.empty_like(k) if group.planes == 2 else k
        path.transfer.fetch(layer, slot, first, k, v)
        yield first, *path.format.decode(k, v, dtype)


def from_position(
    history: Iterable[tuple[int, Tensor, Tensor]], start: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The blocks of a history, without the positions before ``start``."""
    for first, k, v in history:
        cut = max(0, start - first)
        if cut < len(k):
            yield first + cut, k[cut:], v[cut:]


def open_rows(
    path: LayerPath, unit: int, slot: int, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[start % unit, Hkv, D]`` of the open unit before a chunk at ``start``.

    A copy: a chunk longer than the ring overwrites the place that they are read from.

    Args:
        unit: of the algorithm; 1 where selections are regranulated, and none is open then.
    """
    ring_unit, filled = divmod(start, unit)
    at = ring_unit % path.view.group.ring_slots
    k, v = (
        ring[slot, :, at, :, :filled].flatten(0, 1).transpose(0, 1).clone()
        for ring in (path.view.ring_k, path.view.ring_v)
    )
    return path.format.decode(k, v, dtype)


@frozen
class History:
    """History of a request: each iteration streams it anew. See ``topkv.hooks.algorithm``."""

    read: Callable[[], Iterator[tuple[int, Tensor, Tensor]]]

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        return self.read()


class Prefill:
    """Runs prompt chunks and settles requests. Cold: per request, in Python.

    History is streamed block by block on the current stream, each block into memory of its own:
    nothing overlaps yet. Chunks are stored on a stream of their own.

    Args:
        config: blocks and device.
        requests: ring bounds of the requests.
    """

    def __init__(self, config: LoweredConfig, requests: Requests) -> None:
        self.config, self.requests = config, requests
        cuda = config.device.type == "cuda"
        self._stream = torch.cuda.Stream(config.device) if cuda else None

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
        slot, start, selector = chunk.slot, chunk.start, path.selector
        stored = path.format.encode(k, v)
        # What is attended is what has been stored, so that chunks of any size give the same.
        k, v = path.format.decode(*stored, self.config.model.dtype)
        history = self._history(path, slot, 0, start)
        if selector is not None and selector.selects_prompts:
            ids = selector.select_prompt(slot, start, q, k, v, index)
            result, lse = chunk_attention(path.backend, q, k, v, start, history, ids)
            self._store(path, chunk, *stored)
        elif selector is not None:
            unit = selector.view.group.unit
            before_k, before_v = open_rows(path, unit, slot, start, k.dtype)
            result, lse = chunk_attention(path.backend, q, k, v, start, history)
            self._store(path, chunk, *stored)
            keys = torch.cat([before_k, k]) if len(before_k) else k
            values = torch.cat([before_v, v]) if len(before_v) else v
            selector.construct(slot, start - start % unit, keys, values, q, lse, index)
        else:
            result, lse = chunk_attention(path.backend, q, k, v, start, history)
            self._store(path, chunk, *stored)
        if sinks is not None:
            add_sinks(result, lse, sinks)
        out.copy_(result)

    def settle(self, path: LayerPath, slot: int, since: int, length: int) -> None:
        """Call ``settle`` of a layer that selects for itself, with the history that it asks for.

        Args:
            since: first position that no settle has seen.
            length: tokens of the request.
        """
        selector = path.selector
        if selector is None or not selector.settles:
            return
        stored = 0 if selector.settle_whole else since - since % path.view.group.unit
        asked = 0 if selector.settle_whole else since - since % selector.view.group.unit

        def read() -> Iterator[tuple[int, Tensor, Tensor]]:
            return from_position(self._history(path, slot, stored, length), asked)

        selector.settle(slot, since, length, History(read))

    def join(self) -> None:
        """Let the current stream wait for what the offload stream still copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.config.device).wait_stream(self._stream)

    def _history(
        self, path: LayerPath, slot: int, start: int, end: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        config = self.config
        block = config.prefill_block_tokens
        return history_blocks(path, slot, start, end, block, config.model.dtype, config.device)

    def _store(self, path: LayerPath, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Send a chunk's keys and values to their pages, on the offload stream of a GPU."""
        requests, slot = self.requests, chunk.slot
        high = max(int(requests.high[slot]), chunk.start + len(k))
        values = (path.view, slot, chunk.start, k, v, high, bool(requests.resident[slot]))
        if self._stream is None:
            path.transfer.store_chunk(*values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(k.device))
        with torch.cuda.stream(self._stream):
            path.transfer.store_chunk(*values)
        k.record_stream(self._stream)
        v.record_stream(self._stream)
