"""ClusterKV: tokens whose keys point the same way are selected together.

Liu et al., "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression",
DAC 2025, arXiv 2412.03213. Differences from its code stand in the README of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History
from topkv.types import LayerView, Selection
from topkv_clusterkv import reference
from topkv_clusterkv.entry import ClusterParams
from topkv_clusterkv.store import RequestClusters, State, representations

MAX_CLUSTERS = 16384
"""Clusters of a request that the selection kernel holds in registers."""


class ClusterKV:
    """Selects whole clusters of the largest ``<q, mu>`` until the budget is full.

    The first ``sinks`` tokens and those that are in no cluster yet, the open window, are always
    attended. Prefill clusters segments at fixed positions: as chunks come, up to the first one
    that ring and chunk do not hold, and the others at the end of the prompt; decode clusters every
    ``window`` tokens. On a GPU the clustering beside chunks runs on a stream of its own, which the
    group's last layer joins.

    If sinks and open window exceed K, the newest of them are selected.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group, device = setup.model, setup.group, setup.device
        self.settings: ClusterParams = setup.params
        clusters = self.settings.max_clusters(self.group.max_units)
        if clusters > MAX_CLUSTERS:
            reason = (
                f"a request of {self.group.max_units} tokens has up to {clusters} clusters, at "
                f"most {MAX_CLUSTERS} are supported; raise tokens_per_cluster or lower "
                "max_request_tokens"
            )
            raise ConfigError("clusterkv", [reason])
        self.pending = self.settings.pending(self.group.ring_slots)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec(
            representations=representations(self.group, self.settings),
            settle_period=self.settings.window,
            prefix="replay",
        )

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        length, state = start + k.shape[0], layer.pools["state"][slot]
        if start == 0:
            state.zero_()
        state[State.WATERMARK].clamp_(max=start)
        state[State.HELD].clamp_(max=start).clamp_(min=start - self.pending)
        if self.settings.aligned(length) > start:
            self._close_segments(layer, slot, start, k)
        state[State.HELD].clamp_(min=length - self.pending)
        kept = max(start, length - self.pending)
        places = torch.arange(kept, length, device=k.device) % self.pending
        layer.pools["keys"][slot][:, places] = k[kept - start :].transpose(0, 1)
        if layer.index == len(self.group.layers) - 1:
            self._join()

    def _close_segments(self, layer: LayerView, slot: int, start: int, k: Tensor) -> None:
        """Cluster up to the end of the last segment that the chunk fills."""
        # The number of clusters follows from forks, cuts and windows of decode, which the host
        # does not see: behind other tokens it has to ask the device.
        state = layer.pools["state"][slot]
        known = [0] * len(State) if start == 0 else state.tolist()
        first = max(known[State.WATERMARK], self.settings.sinks)
        end = self.settings.aligned(start + k.shape[0])
        # Where keys of the segment are in the host tier alone, it waits for ``settle``.
        if end <= first or first < known[State.HELD]:
            return
        old = self._pending_keys(layer, slot, first, start, start)
        keys = torch.cat([old, k[max(first - start, 0) : end - start]])
        done = RequestClusters(
            layer.pools, slot, self.settings, known[State.BUILT], known[State.CLUSTERS]
        )
        self._aside(keys, lambda: self._cluster(done, [(first, keys, keys)], first))
        _write_clusters(layer, slot, end, done)

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        """Cluster what is in no cluster yet: segments of a prompt, a window of generated tokens.

        The pool holds the newest keys; what reaches further back is streamed.
        """
        self._join()
        state = layer.pools["state"][slot]
        state[State.WATERMARK].clamp_(max=length)
        state[State.HELD].clamp_(max=length).clamp_(min=length - self.pending)
        watermark, built, clusters, held = state.tolist()
        first = max(watermark, self.settings.sinks)
        if length > first:
            done = RequestClusters(layer.pools, slot, self.settings, built, clusters)
            if first >= held:
                done.trim(first)
                done.append(self._pending_keys(layer, slot, first, length, length), first)
            else:
                self._cluster(done, history, first)
            _write_clusters(layer, slot, length, done)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        k = k[:, 0]
        step, pools = layer.step, layer.pools
        rows = (step.slots >= 0) & (step.lengths > 0) & (step.appended != 0)
        slots, newest = step.slots[rows].long(), step.lengths[rows] - 1
        pools["keys"][slots, :, newest.long() % self.pending] = k[rows]
        state = pools["state"]
        state[slots, State.WATERMARK] = torch.minimum(state[slots, State.WATERMARK], newest)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        q = only_query(q)
        step, sinks = layer.step, self.settings.sinks
        slots = step.slots.long().clamp(min=0)
        centroids, ends, members, state = (
            layer.pools[name][slots] for name in ("centroids", "ends", "members", "state")
        )
        clusters = state[:, State.CLUSTERS].long()
        where = reference.reach(step.slots, step.lengths, state[:, State.WATERMARK], sinks)
        scores = reference.head_scores(q, centroids) * self.model.scale
        scores = reference.lane_scores(scores, reference.sizes(ends, clusters) > 0)
        counts = reference.member_counts(ends, members, clusters, where.closed)
        chosen = reference.select(scores, counts, ends, members, where, out.ids.shape[1])
        out.ids.copy_(chosen.flatten(0, 1))
        return out

    def _cluster(
        self,
        done: RequestClusters,
        history: Iterable[tuple[int, Tensor, Tensor]],
        first: int,
    ) -> None:
        """Cluster keys from position ``first`` on, up to the end of the history.

        Segments end at fixed positions, so that clusters do not depend on how a prompt came.
        """
        done.trim(first)
        segment = self.settings.segment
        held: list[Tensor] = []
        for start, keys, _ in history:
            at = max(first, start)
            keys = keys[at - start :]
            while len(keys):
                stop = (at // segment + 1) * segment
                held.append(keys[: stop - at])
                keys = keys[stop - at :]
                at += len(held[-1])
                if at == stop:
                    done.append(torch.cat(held), first)
                    first, held = at, []
        if held:
            done.append(torch.cat(held), first)

    def _pending_keys(
        self, layer: LayerView, slot: int, first: int, end: int, length: int
    ) -> Tensor:
        """Keys ``[n, h, D]`` of positions ``first .. end`` of a request of ``length`` tokens.

        Zeros further back than the pool reaches; callers ask from ``held`` on.
        """
        places = torch.arange(first, max(first, end), device=layer.pools["keys"].device)
        keys = layer.pools["keys"][slot][:, places % self.pending].transpose(0, 1)
        return keys * (places >= length - self.pending)[:, None, None]

    def _aside(self, keys: Tensor, work: Callable[[], None]) -> None:
        """Run the work on the stream of its own, after what wrote the keys."""
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream(keys.device))
        with torch.cuda.stream(self.stream):
            work()
        keys.record_stream(self.stream)

    def _join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def only_query(q: Tensor) -> Tensor:
    """``[B, H, D]`` of queries ``[B, 1, H, D]``, the last dimension adjacent."""
    if q.shape[1] != 1:
        raise ValueError(f"clusterkv: expected one query per row, got q {list(q.shape)}")
    return q[:, 0] if q.stride(-1) == 1 else q[:, 0].contiguous()


def _write_clusters(layer: LayerView, slot: int, end: int, done: RequestClusters) -> None:
    """Store the clusters that are done, of tokens up to ``end``."""
    state = layer.pools["state"][slot]
    state[State.WATERMARK].fill_(end)
    state[State.BUILT].fill_(done.built)
    state[State.CLUSTERS].fill_(done.clusters)
