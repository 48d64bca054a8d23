"""Dense prefill: a chunk over itself and over history streamed block by block, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.requests import RequestTracker
from topkv.types import LayerView
from topkv.workspace import Chunk, LayerPath


def history_blocks(
    transfer: Any,
    layer: LayerView,
    slot: int,
    start: int,
    end: int,
    block: int,
    device: torch.device,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Stream positions ``start .. end`` from their pages, ``block`` tokens at a time.

    Args:
        start: on a unit boundary.
        block: a multiple of the page.

    Yields:
        ``(position, k, v)`` with ``[n, Hkv, D]`` tensors that the caller may keep.
    """
    group = layer.group
    for first in range(start, end, block):
        shape = (min(block, end - first), group.num_kv_heads, group.head_dim)
        k = torch.empty(shape, dtype=group.dtype, device=device)
        v = torch.empty_like(k)
        transfer.fetch(layer, slot, first, k, v)
        yield first, k, v


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
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    history: Iterator[tuple[int, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend a chunk at ``start`` causally to itself and fully to its history.

    Args:
        q: ``[m, H, D]``.
        k, v: ``[m, Hkv, D]``.
        history: blocks of the positions before ``start``.

    Returns:
        fp32 ``[m, H, D]`` and the fp32 ``[m, H]`` natural log-sum-exp.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    backend.prefill(q, k, v, start, start, out, lse)
    for first, past_k, past_v in history:
        part, part_lse = torch.empty_like(out), torch.empty_like(lse)
        backend.prefill(q, past_k, past_v, start, first, part, part_lse)
        merge(out, lse, part, part_lse)
    return out, lse


def open_keys(layer: LayerView, slot: int, start: int) -> Tensor:
    """Keys ``[start % unit, Hkv, D]`` that the open unit holds before a chunk at ``start``.

    A copy: a chunk longer than the ring overwrites the place that they are read from.
    """
    group = layer.group
    unit, filled = divmod(start, group.unit)
    ring = layer.ring_k[slot, :, unit % group.ring_slots, :, :filled]
    return ring.flatten(0, 1).transpose(0, 1).clone()


class Prefill:
    """Runs prompt chunks and settles requests. Cold: per request, in Python.

    Args:
        config: blocks and device.
        tracker: lengths and ring bounds of the requests.
        paths: the layers.
    """

    def __init__(
        self, config: LoweredConfig, tracker: RequestTracker, paths: Sequence[LayerPath]
    ) -> None:
        self.config = config
        self.tracker = tracker
        self.sparse = [path for path in paths if path.algorithm]
        shape = (config.max_requests, config.model.num_heads, config.model.head_dim)
        self._last_queries = {
            path.view.layer: torch.zeros(shape, dtype=config.model.dtype, device=config.device)
            for path in self.sparse
        }
        cuda = config.device.type == "cuda"
        self._stream = torch.cuda.Stream(config.device) if cuda else None

    def run(
        self, path: LayerPath, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Attend, store and represent one chunk in one layer.

        Args:
            q, out: ``[m, H, D]``.
            k, v: ``[m, Hkv, D]``.
        """
        view, slot, start = path.view, chunk.slot, chunk.start
        before = open_keys(view, slot, start) if path.algorithm else None
        history = self._history(path, slot, 0, start)
        result, lse = chunk_attention(path.backend, q, k, v, start, history)
        out.copy_(result)
        self._store(path, chunk, k, v)
        if before is not None:
            first = start - start % view.group.unit
            keys = torch.cat([before, k]) if len(before) else k
            path.algorithm.construct(view, slot, first, keys, q, lse)
            self._last_queries[view.layer][slot] = q[-1]

    def settle(self, slot: int, since: int, length: int) -> None:
        """Call ``settle`` of every sparse layer with the history that it asks for."""
        for path in self.sparse:
            whole = path.algorithm.spec().settle_whole
            first = 0 if whole else since - since % path.view.group.unit
            history = self._history(path, slot, first, length)
            path.algorithm.settle(path.view, slot, since, length, history)

    def warm(self) -> None:
        """Load what the last prompt queries select, so that decoding starts with hits.

        The step tensors hold the rows to warm, none of which appends.
        """
        for path in self.sparse:
            view, lanes = path.view, path.lanes
            queries = self._last_queries[view.layer].index_select(0, view.step.slots)
            path.algorithm.retrieve_topk(view, queries.unsqueeze(1), None, lanes.ids)
            path.transfer.plan(view, lanes.ids, lanes.limit, lanes.plan)
            path.transfer.load(view, lanes.plan)

    def join(self) -> None:
        """Let the current stream wait for what the offload stream still copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.config.device).wait_stream(self._stream)

    def _history(
        self, path: LayerPath, slot: int, start: int, end: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        block = self.config.prefill_block_tokens
        return history_blocks(
            path.transfer, path.view, slot, start, end, block, self.config.device
        )

    def _store(self, path: LayerPath, chunk: Chunk, k: Tensor, v: Tensor) -> None:
        """Send a chunk's keys and values to their pages, on the offload stream of a GPU."""
        tracker, slot = self.tracker, chunk.slot
        high = max(int(tracker.high[slot]), chunk.start + len(k))
        values = (path.view, slot, chunk.start, k, v, high, bool(tracker.resident[slot]))
        if self._stream is None:
            path.transfer.store_chunk(*values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(k.device))
        with torch.cuda.stream(self._stream):
            path.transfer.store_chunk(*values)
        k.record_stream(self._stream)
        v.record_stream(self._stream)
