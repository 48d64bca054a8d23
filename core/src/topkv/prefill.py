"""Dense prefill: a chunk over itself and over history streamed block by block, merged by LSE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.requests import RequestTracker
from topkv.types import Index, LayerView
from topkv.workspace import Chunk, LayerPath

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
    layer, transfer, rows = path.view, path.transfer, path.rows
    group = layer.group
    for first in range(start, end, block):
        shape = (min(block, end - first), group.num_kv_heads, group.head_dim)
        k = torch.empty(shape, dtype=group.dtype, device=device)
        v = torch.empty_like(k) if group.planes == 2 else k
        transfer.fetch(layer, slot, first, k, v)
        yield first, *rows.decode(k, v, dtype)


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
    backend: Any,
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
    backend: Any,
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


def open_keys(path: LayerPath, slot: int, start: int, dtype: torch.dtype) -> Tensor:
    """Keys ``[start % unit, Hkv, D]`` that the open unit holds before a chunk at ``start``.

    A copy: a chunk longer than the ring overwrites the place that they are read from. None where
    selections are regranulated: the unit is the algorithm's, a token, and never open.
    """
    group = path.view.group
    unit, filled = divmod(start, path.seen.group.unit)
    ring = path.view.ring_k[slot, :, unit % group.ring_slots, :, :filled]
    rows = ring.flatten(0, 1).transpose(0, 1).clone()
    return path.rows.decode(rows, rows, dtype)[0]


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
        model, requests = config.model, config.max_requests
        self._last_queries: dict[int, Tensor] = {}
        self._last_weights: dict[int, Tensor] = {}
        for path in self.sparse:
            heads, dim = model.num_heads, model.head_dim
            if path.indexed and model.indexer:
                heads, dim = model.indexer.num_heads, model.indexer.head_dim
                weights = torch.zeros((requests, heads), device=config.device)
                self._last_weights[path.view.layer] = weights
            queries = torch.zeros((requests, heads, dim), dtype=model.dtype, device=config.device)
            self._last_queries[path.view.layer] = queries
        self._chunk_ids: dict[tuple[int, int], Tensor | None] = {}  # by group and slot
        self._indexed: set[int] = set()
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
    ) -> None:
        """Attend, store and represent one chunk in one layer.

        Args:
            q: ``[m, H, D]``.
            k, v: ``[m, Hkv, D]``.
            index: of the rows, where the model has an indexer.
            out: ``[m, H, Dv]``.
        """
        view, slot, start = path.view, chunk.slot, chunk.start
        stored = path.rows.encode(k, v)
        # What is attended is what has been stored, so that chunks of any size give the same.
        k, v = path.rows.decode(*stored, self.config.model.dtype)
        history = self._history(path, slot, 0, start)
        if path.selects_prompts:
            ids = self._select(path, chunk, q, k, index)
            result, _ = chunk_attention(path.backend, q, k, v, start, history, ids)
            self._store(path, chunk, *stored)
        else:
            represents = path.algorithm is not None and not path.shares(index)
            before = open_keys(path, slot, start, k.dtype) if represents else None
            result, lse = chunk_attention(path.backend, q, k, v, start, history)
            self._store(path, chunk, *stored)
            if before is not None:
                queries, keys, weights = path.asked(q, k, index)
                keys = torch.cat([before, keys]) if len(before) else keys
                first = start - start % path.seen.group.unit
                path.algorithm.construct(path.seen, slot, first, keys, queries, lse)
                self._remember(view, slot, queries, weights)
        out.copy_(result)

    def _select(
        self, path: LayerPath, chunk: Chunk, q: Tensor, k: Tensor, index: Index | None
    ) -> Tensor | None:
        """Represent a chunk and select for its rows; None where they see everything.

        A layer without an index of its own goes by the selection of the layer before it.
        """
        view, slot, start = path.seen, chunk.slot, chunk.start
        place = (path.lanes.index, slot)
        if path.shares(index):
            if place not in self._chunk_ids:
                raise path.nothing_to_share()
            return self._chunk_ids[place]
        q, keys, weights = path.asked(q, k, index)
        no_lse = torch.empty((0, self.config.model.num_heads), device=q.device)
        path.algorithm.construct(view, slot, start, keys, q, no_lse)
        self._remember(view, slot, q, weights)
        ids = self._chunk_ids[place] = None  # frees what the layer before has selected
        if start + len(q) > view.group.select:
            shape = (len(q), view.group.select)
            ids = torch.empty(shape, dtype=torch.int32, device=q.device)
            path.algorithm.retrieve_prompt(view, slot, start, q, weights, ids)
        self._chunk_ids[place] = ids
        return ids

    def _remember(self, view: LayerView, slot: int, q: Tensor, weights: Tensor | None) -> None:
        """Keep the last query of a chunk, to warm the buffer with."""
        self._last_queries[view.layer][slot] = q[-1]
        if weights is not None:
            self._indexed.add(view.layer)
            self._last_weights[view.layer][slot] = weights[-1]

    def copy(self, slot: int, twin: int) -> None:
        """Let a fork start as warm as its request."""
        for kept in (*self._last_queries.values(), *self._last_weights.values()):
            kept[twin] = kept[slot]

    def settle(self, group: int, slot: int, since: int, length: int) -> None:
        """Call ``settle`` of the layers of a group that select, with the history it asks for."""
        for path in self.sparse:
            if path.lanes.index != group or not path.selects:
                continue
            whole = path.algorithm.spec().settle_whole
            stored = 0 if whole else since - since % path.view.group.unit
            asked = 0 if whole else since - since % path.seen.group.unit
            history = from_position(self._history(path, slot, stored, length), asked)
            path.algorithm.settle(path.seen, slot, since, length, history)

    def warm(self) -> None:
        """Load what the last prompt queries select, so that decoding starts with hits.

        The step tensors hold the rows to warm, none of which appends.
        """
        for path in self.sparse:
            view, lanes = path.view, path.lanes
            if not path.indexed or view.layer in self._indexed:
                self._retrieve(path)  # else the selection of the layer before it holds
            path.transfer.plan(view, lanes.ids, lanes.limit, lanes.plan)
            path.transfer.load(view, lanes.plan)

    def _retrieve(self, path: LayerPath) -> None:
        layer, slots = path.view.layer, path.view.step.slots
        queries = self._last_queries[layer].index_select(0, slots).unsqueeze(1)
        weights = self._last_weights.get(layer)
        if weights is not None:
            weights = weights.index_select(0, slots)
        lanes = path.lanes
        path.algorithm.retrieve_topk(path.seen, queries, weights, lanes.selected)
        if lanes.tokens:
            lanes.tokens.regranulate(lanes.limit, lanes.ids)

    def forget(self) -> None:
        """Drop the selections of the chunks, which layers of one forward share."""
        self._chunk_ids.clear()

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
