"""Dense prefill: a chunk over itself and over history streamed block by block, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from attrs import frozen
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.hooks.backend import Backend
from topkv.layers import Chunk, LayerPath
from topkv.requests import Requests
from topkv.types import Index

WORKSPACE = 256 << 20
"""Most bytes of the masks of a block of prompt rows."""


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


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a partial result into ``out`` and ``lse`` in place.

    ``softmax`` over two disjoint sets of keys is the average of the two results, weighted by
    ``exp(lse)`` (FlashAttention-2, section 3.1). Fully masked parts have ``lse`` -inf.

    Args:
        out, part: fp32 ``[m, H, D]``.
        lse, part_lse: fp32 ``[m, H]``.
    """
    both = torch.logaddexp(lse, part_lse)
    floor = both.masked_fill(both == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - floor).unsqueeze(-1))
    out.addcmul_(part, torch.exp(part_lse - floor).unsqueeze(-1))
    lse.copy_(both)


def chunk_attention(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    history: Iterable[tuple[int, Tensor, Tensor]],
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a chunk at ``start`` causally to itself and fully to its history.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[m, Hkv, D]``.
        history: blocks of the positions before ``start``.
        ids: int32 ``[m, K]`` all that each query sees; everything if None.

    Returns:
        fp32 ``[m, H, Dv]`` and the fp32 ``[m, H]`` natural log-sum-exp.
    """
    shape = (*q.shape[:2], v.shape[-1])
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for first, part_k, part_v in chain([(start, k, v)], history):
        chunk = first == start
        part, part_lse = (out, lse) if chunk else (torch.empty_like(out), torch.empty_like(lse))
        if ids is None:
            backend.prefill(q, part_k, part_v, start, first, part, part_lse)
        else:
            attend_selected(backend, q, part_k, part_v, start, first, ids, part, part_lse)
        if not chunk:
            merge(out, lse, part, part_lse)
    return out, lse


def attend_selected(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    first: int,
    ids: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """``prefill_selected`` of as many rows at a time as their masks have room for.

    A mask of a whole prompt over itself would grow with the square of its length.

    Args:
        q: ``[m, H, D]`` of positions ``start ..``.
        k, v: ``[n, Hkv, D]`` of positions ``first ..``.
        ids: int32 ``[m, K]`` all that each query sees.
        out: fp32 ``[m, H, Dv]``.
        lse: fp32 ``[m, H]``.
    """
    each = len(k) + 1 + 3 * 8 * ids.shape[1]  # a mask, and int64 places on the way to it
    block = max(1, WORKSPACE // each)
    for row in range(0, len(q), block):
        at = slice(row, row + block)
        keep = selected(ids[at], first, len(k))
        backend.prefill_selected(q[at], k, v, start + row, first, keep, out[at], lse[at])


def selected(ids: Tensor, first: int, count: int) -> Tensor:
    """bool ``[m, count]``: which of the positions ``first ..`` are among the ids ``[m, K]``."""
    place = ids.long() - first
    place = torch.where((place >= 0) & (place < count) & (ids >= 0), place, count)
    keep = torch.zeros((ids.shape[0], count + 1), dtype=torch.bool, device=ids.device)
    return keep.scatter_(1, place, True)[:, :count].contiguous()


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a logit without a value take part in each softmax, in place; ``lse`` is used up.

    ``sum_s exp(l_s) v_s / (sum_s exp(l_s) + exp(sink)) = out * sigmoid(lse - sink)``.

    Args:
        out: ``[..., H, Dv]``.
        lse: fp32 ``[..., H]``.
        sinks: fp32 ``[H]``.
    """
    out.mul_(lse.sub_(sinks).sigmoid_().unsqueeze(-1))


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
