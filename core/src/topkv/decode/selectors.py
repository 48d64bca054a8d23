"""Selectors: one for each sparse layer, bound to it when a coordinator is put together.

``Own`` asks the algorithm of a layer that selects for itself. It also represents prompts, and
keeps the last query of each, by which the buffer is warmed when the prompt turns to decode.
``Selector`` serves a layer that shares, or that the model's indexer leaves out.
"""

from __future__ import annotations

from copy import copy

import torch
from attrs import evolve
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.lanes import LaneBuffers
from topkv.errors import RequestError
from topkv.hooks.algorithm import Algorithm, History
from topkv.ops.chunk_attention import Chosen
from topkv.plugins.contract import has_hook
from topkv.types import Index, LayerView, Selection


class Selector:
    """Base of all selectors, and the selector of a layer that shares.

    Such a layer uses the selection of the last layer of its group that selected, which ``lanes``
    still hold. It keeps nothing of a request.

    Args:
        view: the layer in the units of the algorithm, see ``LoweredGroup.selected_as``.
        lanes: buffers of its group, which keep the last selection.
        selects_prompts: True if prompt chunks attend to a selection too.
    """

    def __init__(self, view: LayerView, lanes: LaneBuffers, selects_prompts: bool) -> None:
        self.view, self.lanes, self.selects_prompts = view, lanes, selects_prompts

    def seen_by(self, lanes: LaneBuffers) -> Selector:
        """Return a copy that selects by the step tensors of ``lanes`` and into those buffers; what
        is kept of requests is shared."""
        other = copy(self)
        other.lanes, other.view = lanes, evolve(self.view, step=lanes.step)
        return other

    def check_index(self, index: Index | None) -> None:
        """Refuse an index where the layer has none, or the lack of one. Hot."""
        if index is not None:
            raise RequestError(
                f"layer {self.view.layer} was given an index, and the model's indexer leaves it "
                "out; add the layer to IndexerShape.layers, or pass None"
            )

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> Selection:
        """Follow the new tokens of each row and return the units selected for it. Hot.

        Args:
            q: ``[B * Q, H, D]``.
            k, v: ``[B * Q, Hkv, D]``.
            index: index of the rows, where the algorithm selects by the model's indexer.
        """
        return self.lanes.selection

    def correct(self, selection: Selection, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Correct ``out [B, Q, H, Dv]`` and ``lse [B, Q, H]`` for what was not attended. Hot."""

    def select_prompt(
        self, slot: int, start: int, q: Tensor, k: Tensor, v: Tensor, index: Index | None
    ) -> Chosen | None:
        """Represent a chunk and return what its rows see; None where they see everything. Cold."""
        return self.lanes.prompts[slot]

    def warm(self) -> Selection:
        """Select by the last query of each row's prompt. The rows append nothing."""
        return self.lanes.selection

    def kept(self) -> dict[str, Tensor]:
        """Return the tensors that are kept for ``warm``: a row for each request, by slot."""
        return {}


class Own(Selector):
    """Selector of a layer whose own algorithm selects for it.

    Args:
        config: sizes.
        view, lanes: as of ``Selector``.
        algorithm: the algorithm of its group.

    Attributes:
        indexed: the algorithm selects by the model's indexer, not by its queries and keys.
        settles: True if ``settle`` does anything.
        settle_whole: True if ``settle`` wants the history from position 0.
        follows: True if ``truncated`` does anything.
    """

    def __init__(
        self, config: LoweredConfig, view: LayerView, lanes: LaneBuffers, algorithm: Algorithm
    ) -> None:
        super().__init__(view, lanes, has_hook(algorithm, "retrieve_prompt"))
        group = config.groups[lanes.index]
        self.algorithm, self.indexed = algorithm, group.indexed
        # Rows of a prompt list the unit that they are in, which steps are given by the core.
        self.width = view.group.select + (group.tail == "forced" and not group.regrained)
        self.settles = has_hook(algorithm, "settle")
        self._corrects = has_hook(algorithm, "correct")
        self.follows = has_hook(algorithm, "truncated")
        self.settle_whole = algorithm.spec().settle_whole
        model, requests, device = config.model, config.max_requests, view.step.slots.device
        heads, dim, self._last_weights = model.num_heads, model.head_dim, None
        if group.indexed and model.indexer is not None:
            heads, dim = model.indexer.num_heads, model.indexer.head_dim
            weights = torch.zeros((requests, heads), dtype=torch.float32, device=device)
            self._last_weights = weights
        self._last_queries = torch.zeros((requests, heads, dim), dtype=model.dtype, device=device)

    def check_index(self, index: Index | None) -> None:
        if self.indexed and index is None:
            raise RequestError(
                f"layer {self.view.layer} was given no index and selects by it; hand over what "
                "the model's indexer made of the rows"
            )

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> Selection:
        queries, keys, weights = self._inputs(q, k, index)
        rows = (-1, self.lanes.queries)
        self.algorithm.update(self.view, keys.unflatten(0, rows), v.unflatten(0, rows))
        weights = None if weights is None else weights.unflatten(0, rows)
        return self._retrieve(queries.unflatten(0, rows), weights)

    def correct(self, selection: Selection, q: Tensor, out: Tensor, lse: Tensor) -> None:
        if self._corrects:
            self.algorithm.correct(self.view, q, selection, out, lse)

    def construct(
        self,
        slot: int,
        start: int,
        k: Tensor,
        v: Tensor,
        q: Tensor,
        lse: Tensor,
        index: Index | None,
    ) -> None:
        """Represent a prompt chunk. Cold.

        Args:
            start: position of the first key, on a boundary of the algorithm's units.
            k, v: ``[m, Hkv, D]`` of the open unit, if it holds tokens, and of the chunk.
            q: ``[c, H, D]`` of the chunk, the last c positions.
            lse: fp32 ``[c, H]``, empty before attention.
        """
        queries, keys, weights = self._inputs(q, k, index)
        self.algorithm.construct(self.view, slot, start, keys, v, queries, lse)
        self._last_queries[slot] = queries[-1]
        if self._last_weights is not None and weights is not None:
            self._last_weights[slot] = weights[-1]

    def select_prompt(
        self, slot: int, start: int, q: Tensor, k: Tensor, v: Tensor, index: Index | None
    ) -> Chosen | None:
        no_lse = torch.empty((0, q.shape[1]), dtype=torch.float32, device=q.device)
        self.construct(slot, start, k, v, q, no_lse, index)
        group, chosen = self.view.group, None
        self.lanes.prompts[slot] = None  # the old tensor goes before the new one comes
        if start + len(q) > self.width * group.unit:
            queries, _, weights = self._inputs(q, k, index)
            ids = q.new_empty((len(q), group.lane_heads, self.width), dtype=torch.int32)
            self.algorithm.retrieve_prompt(self.view, slot, start, queries, weights, ids)
            chosen = Chosen(ids, group.unit)
        self.lanes.prompts[slot] = chosen
        return chosen

    def warm(self) -> Selection:
        slots, weights = self.view.step.slots, self._last_weights
        queries = self._last_queries.index_select(0, slots).unsqueeze(1)
        if weights is not None:
            weights = weights.index_select(0, slots).unsqueeze(1)
        return self._retrieve(queries, weights)

    def settle(self, slot: int, since: int, length: int, history: History) -> None:
        """Close a prompt or a period. Cold."""
        self.algorithm.settle(self.view, slot, since, length, history)

    def truncated(self, slot: int, length: int) -> None:
        """Follow a request that has lost its tokens from ``length`` on. Cold."""
        self.algorithm.truncated(self.view, slot, length)

    def kept(self) -> dict[str, Tensor]:
        kept = {"queries": self._last_queries, "weights": self._last_weights}
        return {name: rows for name, rows in kept.items() if rows is not None}

    def _inputs(
        self, q: Tensor, k: Tensor, index: Index | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and weights that the algorithm is given."""
        if not self.indexed or index is None:
            return q, k, None
        return index.q, index.k.unsqueeze(1), index.weights

    def _retrieve(self, queries: Tensor, weights: Tensor | None) -> Selection:
        """Select; layers that share find the selection in ``lanes``."""
        lanes = self.lanes
        found = self.algorithm.retrieve_topk(self.view, queries, weights, lanes.room)
        lanes.selection = found
        return found
