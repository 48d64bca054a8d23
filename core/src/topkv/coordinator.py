"""SparseCoordinator: the whole decode path, from the new token to the attended output.

Read this file from top to bottom: ``forward_begin`` puts the rows of a forward into place,
``attention`` runs one layer, ``forward_end`` closes what the forward filled. For decode rows all
between the two is device work on tensors with fixed addresses, which a CUDA graph can capture;
chunks of prompts read the host.
Requests begin, end, grow and fork between forwards: ``topkv.between`` has the calls,
``topkv.requests.requests`` what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from topkv.assembly.assembly import allocate, connect, make_plugins
from topkv.assembly.stages import bind_stages
from topkv.between import BetweenForwards
from topkv.config import LoweredConfig
from topkv.decode.layers import Forward, LayerPath
from topkv.decode.selectors import Own
from topkv.errors import DeviceMemoryError, RequestError, TopkvError, is_out_of_memory
from topkv.observers import Observers
from topkv.ops.chunk_attention import add_sinks
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv.prompts.prefill import Prefill
from topkv.requests.checks import check_begin, check_end, check_idle, check_queries, check_rows
from topkv.requests.requests import Requests
from topkv.types import Index, Selection


class SparseCoordinator(BetweenForwards):
    """Sparse decoding for the attention layers of one model.

    Args:
        config: a lowered configuration (``topkv.config.lower``).
        registry: where plugins are looked up; the process-wide registry by default.

    Attributes:
        model, config: geometry and configuration.
        registry: where its plugins were looked up.
        specs: the algorithm's spec of each group; None for a dense one.
        layers: the path of each layer.
        lanes, transfers: lane buffers and transfer engine of each group.
        requests: state of every request.
        before_lease: functions of stages that ``forward_begin`` calls, see ``Stage.bind``.
        manager: memory of both tiers.
        keeper: finds pages that no request holds, as ``Keeper.bind`` of the plugin that the
            setting ``pages`` names gave it; None where nobody keeps any.
        step: the step tensors.
        forward: the open forward, or None.

    Raises:
        ConfigError, PluginError: a plugin refuses; nothing is left allocated.
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """

    def __init__(self, config: LoweredConfig, registry: PluginRegistry | None = None) -> None:
        self.registry = registry or default_registry()
        try:
            with torch.inference_mode(False):  # outside of it no inference tensor can be written
                self._assemble(config, self.registry)
        except BaseException as error:
            self.close()
            if isinstance(error, TopkvError) or not is_out_of_memory(error):
                raise
            raise DeviceMemoryError(
                f"the device buffers do not fit: {error}; lower buffer, max_requests or max_tokens"
            ) from error

    def _assemble(self, config: LoweredConfig, registry: PluginRegistry) -> None:
        self.model, self.config = config.model, config
        self._plugins = plugins = make_plugins(registry, config)
        self.specs = plugins.specs
        self._tensors = tensors = allocate(config, plugins)
        self.manager = tensors.manager
        self.lanes, self.step = tensors.lanes, tensors.uploader.step
        self.transfers, self.layers = connect(registry, config, plugins, tensors)
        self.requests = Requests(
            config=self.config,
            manager=self.manager,
            step=tensors.uploader,
            transfers=self.transfers,
            generated=plugins.least("generated"),
            undo=plugins.least("undo"),
            shares_prefixes=all(spec.prefix == "pages" for spec in plugins.specs if spec),
            selectors=[each.selector for each in self.layers if isinstance(each.selector, Own)],
        )
        self.prefill = Prefill(self.config, self.requests, self.layers)
        sparse = [path for path in self.layers if path.selector]
        self.observers = Observers(config, registry, self.requests, sparse)
        periods = [[(spec and spec.settle_period) or 2**31 - 1] for spec in plugins.specs]
        self._settle_periods, self._settles_later = np.array(periods), min(periods) < [2**31 - 1]
        self.before_lease = bind_stages(plugins.algorithms, self)
        self.keeper: Any = plugins.keeper.bind(self) if plugins.keeper else None

    def forward_begin(
        self,
        decode: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        append: Sequence[int] | None = None,
        queries: int = 1,
    ) -> None:
        """Lease pages, settle what is due, and upload the rows of a forward. Outside graphs.

        Args:
            decode: slots of the decode rows, -1 for padded ones. Each is ``queries`` rows of the
                packed batch.
            prefill: ``(slot, tokens)`` chunks, whose rows follow the decode rows and each other.
            append: tokens that each decode row appends, 0 to ``queries``; as many as it has
                queries by default. The first rows of a request are these tokens, in order, or its
                newest one again where it appends none; what stands behind them is padding.
            queries: Q, at most ``max_queries`` of the configuration. All queries of a request
                share one selection a lane, and each sees the tokens up to its own; ``rollback``
                takes tokens back that were drafted and are rejected.

        Raises:
            HostMemoryError: a page is missing; nothing has changed.
            RequestError: a slot is unknown or named twice, a row has too many queries or tokens, a
                forward is open, or an algorithm has no room for another token after the prompt.
        """
        check_idle(self.forward, "forward_begin")
        check_queries(decode, append, queries, self.config.max_queries)
        rows = np.array(decode, dtype=np.intp)  # a copy, read again at the end
        forward = Forward(rows, append, queries)
        for slot, tokens in prefill:
            forward.add_chunk(slot, tokens)
        check_begin(forward, self.requests)
        for call in self.before_lease:
            call(forward.live)
        self.requests.own_pages(forward)
        self._settle(forward.live)
        for chunk in forward.chunks:
            self.requests.flush(chunk.slot)
        self._upload(rows, forward.appended, queries)
        if forward.chunks:
            self.prefill.ahead.begin(forward.chunks)
        self.forward = forward
        self.observers.notify("before_forward", forward)

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Index | None = None,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Run one layer: decode rows first, then the prefill chunks in order.

        Args:
            layer: model layer number.
            q: ``[rows, H, D]`` post-RoPE queries; rows at any stride, here and below. Request b
                of the decode rows has rows ``b * queries ..``.
            k, v: ``[rows, Hkv, D]`` post-RoPE keys, and values. Of latent attention the rows
                ``[rows, 1, D]``, twice.
            index: of the model's own indexer for these rows; None where the layer has none. Only
                algorithms that select by an indexer read it.
            out: ``[rows, H, out_dim]`` to write to; made if None.
            sinks: fp32 ``[H]`` logits that take part in each softmax and have no value, of models
                with learned attention sinks.

        Returns:
            ``out``.

        Raises:
            RequestError: no forward is open, the rows are not those that it announced, or the
                index is not what the layer selects by.
        """
        forward = self.forward
        if forward is None:
            raise RequestError("attention belongs between forward_begin and forward_end")
        forward.called.add(layer)
        check_rows(forward, self.model, q, k, v)
        path = self.layers[layer - self.model.first_layer]
        if path.selector and len(q):
            path.selector.check_index(index)
        if out is None:
            out = q.new_empty((*q.shape[:-1], self.model.out_dim))
        if forward.decoded:
            self.decode_rows(path, forward, q, k, v, index, out, sinks)
        for chunk in forward.chunks:
            if chunk.tokens:
                at = chunk.rows
                own = None if index is None else index.rows(at)
                self.prefill.run(path, chunk, q[at], k[at], v[at], own, out[at], sinks)
        forward.attended.add(layer)
        return out

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
        """Append the new tokens of a layer's decode rows, the first of the packed batch, as host
        memory rounds them, and attend. Device work alone: engines record it. Hot."""
        lanes, own, rows = path.lanes, slice(0, forward.decoded), (-1, path.lanes.queries)
        k, v = path.host.round(k[own], v[own], lanes.packed)
        stored = [each.unflatten(0, rows) for each in path.format.pack(k, v, lanes.packed)]
        path.transfer.append(path.view, *stored)
        for turn, at in path.turns(forward):
            seen = None if index is None else index.rows(at)
            selection = self._select(turn, q[at], k[at], v[at], seen)
            self._attend(turn, selection, q[at], out[at], sinks)

    @staticmethod
    def _select(
        path: LayerPath, q: Tensor, k: Tensor, v: Tensor, index: Index | None
    ) -> Selection | None:
        """Return the units that the new tokens attend to, loaded. None for all."""
        if not path.selector:
            return None
        selection = path.selector.select(q, k, v, index)
        plan = path.loads.plan(selection)
        path.loads.load(plan)
        path.backend.adapt_page_table(path.view, plan, path.lanes.tables)
        return selection

    @staticmethod
    def _attend(
        path: LayerPath, selection: Selection | None, q: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        lanes = path.lanes
        q, out = (each.unflatten(0, (-1, lanes.queries)) for each in (q, out))
        path.backend.attend(q, path.k_slots, path.v_slots, lanes.tables, out, lanes.lse)
        if path.selector and selection:
            path.selector.correct(selection, q, out, lanes.lse)
        if sinks is not None:
            add_sinks(out, lanes.lse, sinks)

    def offload(self) -> None:
        """Copy the units that this step's decode rows filled to the host. Capturable."""
        for transfer in self.transfers:
            transfer.offload()

    def forward_end(self, offloaded: bool = False) -> None:
        """Close the forward: offload, advance lengths, end requests that were to end.

        Args:
            offloaded: a captured graph has run ``offload`` already.

        Raises:
            RequestError: no forward is open, or a layer has not run; nothing has changed.
        """
        forward = self.forward
        if forward is None:
            raise RequestError("forward_end without forward_begin")
        check_end(forward, self.model)
        if forward.decoded and not offloaded:
            self.offload()
        if forward.chunks:
            self.prefill.join()
        self.requests.advance(forward)
        self._close(forward)
        self.observers.notify("after_forward", forward)

    def forward_abort(self) -> None:
        """Drop an open forward, as after an exception; its tokens are not appended. Cold."""
        forward = self.forward
        if forward is None:
            return
        self.prefill.join()
        self._join()
        chunks = [chunk.slot for chunk in forward.chunks]
        self.requests.restore_all([*forward.live.tolist(), *chunks])
        self._close(forward)

    def _close(self, forward: Forward) -> None:
        self.forward = None
        for lanes in self.lanes:
            lanes.prompts.clear()
        for slot in forward.ending:
            self.requests.end(slot)

    def settle(self, slots: Sequence[int]) -> None:
        """Settle what is due and warm buffers now, not when ``forward_begin`` decodes. Cold."""
        check_idle(self.forward, "settle")
        for slot in slots:
            self.requests.check(slot)
        self._settle(np.asarray(slots, dtype=np.intp))

    def _settle(self, slots: np.ndarray) -> None:
        """Settle all groups of requests that turn to decode, and warm those requests; settle
        single groups whose period is over."""
        requests = self.requests
        fresh = requests.fresh[slots]
        if not self._settles_later and not fresh.any():
            return  # most steps
        due = requests.length[slots] - requests.settled[:, slots] >= self._settle_periods
        due |= fresh
        if not due.any():
            return
        for slot, groups in zip(slots[due.any(0)].tolist(), due.T[due.any(0)], strict=True):
            requests.flush(slot)
            requests.pages.upload()
            for path in self.layers:
                group = path.lanes.index
                if groups[group]:
                    since, length = int(requests.settled[group, slot]), requests.length[slot]
                    self.prefill.settle(path, slot, since, int(length))
            requests.settled[groups, slot] = requests.length[slot]
        slots = slots[fresh]
        requests.fresh[slots], requests.prompt[slots] = False, requests.length[slots]
        if len(slots):
            self._warm(slots)

    def _warm(self, slots: np.ndarray) -> None:
        """Load the selection of each prompt's last query, so that decoding starts with hits."""
        self._upload(slots, np.zeros(len(slots), np.int32), queries=1)
        try:
            for path in self.layers:
                if path.selector:
                    path.loads.load(path.loads.plan(path.selector.warm()))
        except BaseException:
            self._join()
            self.requests.restore_all(slots)
            raise

    def _join(self) -> None:
        """Let the current stream wait for all loads that were begun."""
        for lanes in self.lanes:
            lanes.side.join()

    def _upload(self, rows: np.ndarray, appended: np.ndarray, queries: int) -> None:
        self.requests.upload(rows, appended, queries)
        for lanes in self.lanes:
            lanes.begin(queries)
