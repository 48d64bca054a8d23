"""SparseCoordinator: the whole decode path, from the new token to the attended output.

Read this file from top to bottom: ``forward_begin`` puts the rows of a forward into place,
``attention`` runs one layer, ``forward_end`` closes what the forward filled. Everything between
the two is device work on tensors with fixed addresses and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from topkv.assembly import connect, make_plugins
from topkv.config import LoweredConfig
from topkv.config.layers import show_ranges
from topkv.errors import RequestError
from topkv.kv.manager import SparseKVCacheManager
from topkv.lifecycle import RequestCalls
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv.prefill import Prefill
from topkv.report import MemoryReport, TransferReport, memory_report, transfer_report
from topkv.types import Index
from topkv.workspace import Chunk, LaneBuffers, LayerPath


class SparseCoordinator(RequestCalls):
    """Sparse decoding for the attention layers of one model.

    Args:
        config: a lowered configuration (``topkv.config.lower``).
        registry: where plugins are looked up; the process-wide registry by default.

    Raises:
        ConfigError, PluginError: nothing was allocated.
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """

    def __init__(self, config: LoweredConfig, registry: PluginRegistry | None = None) -> None:
        registry = registry or default_registry()
        plugins = make_plugins(registry, config)
        self.model, self.config = config.model, plugins.config
        self.manager = SparseKVCacheManager(self.config, plugins.specs)
        self.tracker = self.manager.tracker
        self.step = self.manager.uploader.step
        self.observers = registry.create_all("observer")
        connected = connect(registry, plugins, self.manager)
        self.transfers, self.lanes = connected.transfers, connected.lanes
        self.layers = connected.layers
        never = 2**31 - 1
        periods = [spec.settle_period if spec else None for spec in plugins.specs]
        self._settle_periods = np.asarray([period or never for period in periods])[:, None]
        self._generated = plugins.least("generated")
        self.prefill = Prefill(self.config, self.tracker, self.layers)
        self._chunks: list[Chunk] = []
        self._rows = self._appended = np.zeros(0, dtype=np.int32)
        self._count = 0
        self._attended: set[int] = set()
        self._forward_open = False
        self._ending: list[int] = []

    # A forward.

    @property
    def forward_open(self) -> bool:
        """Whether a forward has begun that was neither ended nor aborted."""
        return self._forward_open

    def forward_begin(
        self,
        decode: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        append: Sequence[bool] | None = None,
    ) -> None:
        """Put the rows of a forward into place. Outside graphs.

        Args:
            decode: slots of the decode rows, -1 for padded ones. Each is one row.
            prefill: ``(slot, tokens)`` chunks, whose rows follow the decode rows.
            append: which decode rows append their token; all but padded ones by default.

        Raises:
            HostMemoryError: a page is missing; nothing has changed.
            RequestError: a slot is unknown or named twice, a forward is open, or an algorithm has
                no room for another token after the prompt.
        """
        self._between_forwards("forward_begin")
        rows = np.array(decode, dtype=np.int32)  # a copy: it is read again at the end
        live = rows >= 0
        if len(rows) > self.config.max_requests:
            raise RequestError(
                f"{len(rows)} decode rows exceed max_requests = {self.config.max_requests}"
            )
        for slot, tokens in prefill:
            if tokens < 0:
                raise RequestError(
                    f"chunk ({slot}, {tokens}) has fewer than 0 tokens; rollback and truncate "
                    "take tokens back"
                )
        chunks = np.asarray([slot for slot, _ in prefill], dtype=np.int32)
        self.tracker.check_all(np.append(rows[live], chunks))
        appended = np.asarray(live if append is None else live & np.asarray(append), np.int32)
        self._check_generated(rows[appended == 1], 1)
        in_need = self.manager.without_page(rows[appended == 1])
        self._own_pages([*((slot, 1) for slot in in_need.tolist()), *prefill])
        self._settle(rows[live])
        for slot, _ in prefill:
            self.flush(slot)

        self._rows, self._appended, self._chunks = rows, appended, []
        first = len(rows)
        for slot, tokens in prefill:
            start = int(self.tracker.length[slot])
            self._chunks.append(Chunk(slot, start, slice(first, first + tokens)))
            first += tokens
        self._count, self._attended = first, set()
        self._forward_open = True
        self._upload(rows, appended)
        for observer in self.observers:
            observer.before_forward(rows, first - len(rows))

    def _own_pages(self, writers: list[tuple[int, int]]) -> None:
        """Lease the pages that the forward writes, and copy those that are shared; all or none."""
        page = self.config.page_tokens
        ends = [(slot, int(self.tracker.length[slot]) + tokens) for slot, tokens in writers]
        places = [
            (slot, index)
            for (slot, end), (_, tokens) in zip(ends, writers, strict=True)
            for index in range((end - tokens) // page, -(-end // page))
        ]
        self.manager.lease(ends, spare=self.manager.copies_needed(places))
        for slot, index in places:
            self.manager.own_page(slot, index)

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Index | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One layer: decode rows first, then the prefill chunks in order.

        Args:
            layer: model layer number.
            q: ``[rows, H, D]`` post-RoPE queries.
            k, v: ``[rows, Hkv, D]`` post-RoPE keys, and values. Of latent attention the rows
                ``[rows, 1, D]``, twice.
            index: what the model's own indexer computed for the rows. None where a model has
                none; and in a model that has one, where the layer shares the selection of the
                layer before it, of the same group.
            out: ``[rows, H, out_dim]`` to write to; made if None.

        Returns:
            ``out``.

        Raises:
            RequestError: no forward is open, the rows are not those that it announced, or the
                layer shares a selection and none has been made for its group.
        """
        if not self._forward_open:
            raise RequestError("attention belongs between forward_begin and forward_end")
        self._check_rows(q, k, v)
        self._attended.add(layer)
        path = self.layers[layer]
        if out is None:
            out = q.new_empty((*q.shape[:-1], self.model.out_dim))
        batch = len(self._rows)
        if batch:
            ours = None if index is None else index.rows(slice(0, batch))
            self._decode(path, q[:batch], k[:batch], v[:batch], ours, out[:batch])
        for chunk in self._chunks:
            rows = chunk.rows
            if rows.stop > rows.start:
                ours = None if index is None else index.rows(rows)
                self.prefill.run(path, chunk, q[rows], k[rows], v[rows], ours, out[rows])
        return out

    def _check_rows(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse other shapes than those of the forward: kernels would read or leave out rows."""
        model, rows = self.model, self._count
        keys = (rows, model.num_kv_heads, model.head_dim)
        if q.shape == (rows, model.num_heads, model.head_dim) and k.shape == v.shape == keys:
            return
        expected = [rows, model.num_heads, model.head_dim]
        raise RequestError(
            f"expected q {expected}, k and v {list(keys)} for the {rows} rows of this forward, "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )

    def attention_begin(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: Index | None = None
    ) -> LaneBuffers:
        """Append, update, select, plan, load and adapt: for engines with kernels of their own.

        Returns:
            Lane buffers, whose ``table`` and ``lengths`` index the layer's ``k_slots`` and
            ``v_slots``.

        Raises:
            RequestError: the layer shares a selection, and none has been made for its group.
        """
        path = self.layers[layer]
        view, lanes = path.view, path.lanes
        path.transfer.append(view, *path.rows.encode(k, v, lanes.packed))
        if path.algorithm:
            if not path.shares(index):
                queries, keys, weights = path.asked(q, k, index)
                selected = lanes.selected
                path.algorithm.update(path.seen, keys)
                path.algorithm.retrieve_topk(path.seen, queries.unsqueeze(1), weights, selected)
                if lanes.tokens:
                    lanes.tokens.regranulate(lanes.limit, lanes.ids)
                lanes.chosen = True
            elif not lanes.chosen:  # else ``ids`` still holds the selection before it
                raise path.nothing_to_share()
            if lanes.tokens:
                lanes.tokens.count(path.extra)
            path.transfer.plan(view, lanes.ids, lanes.limit, lanes.plan)
            path.transfer.load(view, lanes.plan)
            path.backend.adapt_page_table(view, lanes.plan, lanes.table, lanes.lengths)
        return lanes

    def _decode(
        self, path: LayerPath, q: Tensor, k: Tensor, v: Tensor, index: Index | None, out: Tensor
    ) -> None:
        lanes = self.attention_begin(path.view.layer, q, k, v, index)
        path.backend.attend(
            lanes.by_lane(q),
            path.k_slots,
            path.v_slots,
            lanes.table,
            lanes.lengths,
            lanes.by_lane(out),
            lanes.lse,
        )

    def offload(self) -> None:
        """Copy the units that this step's decode rows filled to the host. Capturable."""
        for transfer in self.transfers:
            transfer.offload()

    def forward_end(self, offloaded: bool = False) -> None:
        """Close the forward: offload, advance lengths, carry out the ends that were asked for.

        Args:
            offloaded: a captured graph has run ``offload`` already.
        """
        if not self._forward_open:
            raise RequestError("forward_end without forward_begin")
        self._check_layers()
        if len(self._rows) and not offloaded:
            self.offload()
        if self._chunks:
            self.prefill.join()
        tracker = self.tracker
        writers = self._rows[self._appended == 1]
        tracker.length[writers] += 1
        tracker.dirty[writers] = True
        for chunk in self._chunks:
            tokens = chunk.rows.stop - chunk.rows.start
            tracker.length[chunk.slot] += tokens
            tracker.fresh[chunk.slot] |= tokens > 0
        touched = [*writers.tolist(), *(chunk.slot for chunk in self._chunks)]
        tracker.high[touched] = np.maximum(tracker.high[touched], tracker.length[touched])
        tokens = sum(chunk.rows.stop - chunk.rows.start for chunk in self._chunks)
        self._close_forward()
        for observer in self.observers:
            observer.after_forward(self._rows, tokens)

    def _check_layers(self) -> None:
        """Refuse to close a forward in which some layers have not appended their tokens.

        Decode rows may have run in a graph, which calls nothing here.
        """
        left_out = [layer for layer in range(len(self.layers)) if layer not in self._attended]
        chunks = self._count > len(self._rows)
        if left_out and (self._attended or chunks):
            raise RequestError(
                f"attention was not called for layers {show_ranges(left_out)} of this forward; "
                "call it for each layer, or drop the forward with forward_abort"
            )

    def forward_abort(self) -> None:
        """Drop an open forward, after an exception say; its tokens are not appended. Cold."""
        if not self._forward_open:
            return
        if self._chunks:
            self.prefill.join()
        # What was written stays in the ring, so its bound moves although no length does. A
        # chunk may have overwritten the whole ring; the host has everything before it.
        writers = self._rows[self._appended == 1]
        high = self.tracker.high
        high[writers] = np.maximum(high[writers], self.tracker.length[writers] + 1)
        chunks = self._chunks
        self._close_forward()
        for chunk in chunks:
            if self.tracker.active[chunk.slot]:
                self._restore(chunk.slot)

    def _close_forward(self) -> None:
        self._forward_open, self._chunks = False, []
        self.prefill.forget()
        ending, self._ending = self._ending, []
        for slot in ending:
            self.request_end(slot)

    def _settle(self, slots: np.ndarray) -> None:
        """Settle all groups where prefill has turned to decode, and warm those; settle a group
        whose period is full."""
        tracker = self.tracker
        fresh = slots[tracker.fresh[slots]]
        due = tracker.length[slots] - tracker.settled[:, slots] >= self._settle_periods
        due |= tracker.fresh[slots]
        for slot, groups in zip(slots[due.any(0)].tolist(), due.T[due.any(0)], strict=True):
            self.flush(slot)
            self.manager.uploader.upload_pages()
            for group in np.flatnonzero(groups).tolist():
                length = int(tracker.length[slot])
                self.prefill.settle(group, slot, int(tracker.settled[group, slot]), length)
                tracker.settled[group, slot] = length
        tracker.fresh[fresh], tracker.prompt[fresh] = False, tracker.length[fresh]
        if len(fresh):
            self._upload(fresh, np.zeros(len(fresh), np.int32))
            self.prefill.warm()

    def _upload(self, rows: np.ndarray, appended: np.ndarray) -> None:
        self.manager.uploader.upload(rows, appended)
        for lanes in self.lanes:
            lanes.begin(self.manager.uploader)

    def memory(self) -> MemoryReport:
        """Bytes on both tiers, counted from tensors."""
        return memory_report(self.manager)

    def transfers_of(self, slots: Sequence[int]) -> TransferReport:
        """Hits, misses, bytes and extra tokens of requests since they began. Synchronizes."""
        return transfer_report(self.manager, slots)

    def check_integrity(self) -> None:
        """See ``SparseKVCacheManager.check_integrity``."""
        self.manager.check_integrity()

    def close(self) -> None:
        """Unregister the host memory. Idempotent."""
        self.manager.close()
