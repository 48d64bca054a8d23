"""Where the selection of a layer comes from, bound to the layer when it is put together.

The decode path calls ``select`` and finds units in ``lanes.ids``, whoever has put them there:

* ``Own``: the layer's algorithm, in every layer that selects for itself,
* ``Shared``: a layer before it, where the model's indexer leaves the layer out,
* ``Regranulated`` and ``SharedRegranulated``: the same, of tokens that become the units which
  hold them.

Selectors also keep what a prompt leaves behind for decoding: representations, and the last query,
with which the buffer is warmed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.errors import RequestError
from topkv.hooks.algorithm import Algorithm, History
from topkv.hooks.binding import has_hook
from topkv.lanes import LaneBuffers
from topkv.types import Index, LayerView


class Shared:
    """The layer goes by the selection of the layer before it, which ``lanes`` still hold.

    Attributes:
        selects_prompts: whether prompt chunks attend to a selection too.
        settles: whether ``settle`` does anything.
        settle_whole: whether it wants the history from position 0.
    """

    settles = settle_whole = False

    def __init__(self, view: LayerView, lanes: LaneBuffers, selects_prompts: bool) -> None:
        self.view, self.lanes, self.selects_prompts = view, lanes, selects_prompts

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        """Leave ``lanes.ids`` as they are. Hot."""
        self._refuse(index)

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
        """Nothing is kept to select for this layer."""
        self._refuse(index)

    def select_prompt(
        self, slot: int, start: int, q: Tensor, k: Tensor, v: Tensor, index: Index | None
    ) -> Tensor | None:
        """What the layer before it selected for the rows of the chunk."""
        self._refuse(index)
        return self.lanes.prompts[slot]

    def warm(self) -> None:
        """Leave ``lanes.ids`` as the layer before it has warmed them."""

    def settle(self, slot: int, since: int, length: int, history: History) -> None:
        """Nothing is kept to select for this layer."""

    def truncated(self, slot: int, length: int) -> None:
        """Nothing is derived from decoded tokens."""

    def copy(self, slot: int, twin: int) -> None:
        """Nothing is kept by slot."""

    def _refuse(self, index: Index | None) -> None:
        if index is not None:
            raise RequestError(
                f"layer {self.view.layer} was given an index, and the model's indexer leaves it "
                "out; add the layer to IndexerShape.layers, or pass None"
            )


class SharedRegranulated(Shared):
    """A shared selection of tokens: the layer attends to the extra tokens as well."""

    def __init__(
        self, view: LayerView, lanes: LaneBuffers, selects_prompts: bool, extra: Tensor
    ) -> None:
        super().__init__(view, lanes, selects_prompts)
        assert lanes.tokens is not None
        self.extra, self.tokens = extra, lanes.tokens

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        """Count what is attended beyond the selection. Hot."""
        super().select(q, k, v, index)
        self.tokens.count(self.extra)


class Own:
    """The layer's algorithm selects for it.

    Args:
        config: sizes.
        view: what the algorithm sees of the layer.
        algorithm: the algorithm of its group.
        lanes: where selections go.
        indexed: the algorithm goes by the model's indexer, not by its queries and keys.
        device: where the last queries lie.
    """

    def __init__(
        self,
        config: LoweredConfig,
        view: LayerView,
        algorithm: Algorithm,
        lanes: LaneBuffers,
        indexed: bool,
        device: torch.device,
    ) -> None:
        self.view, self.algorithm, self.lanes, self.indexed = view, algorithm, lanes, indexed
        self.selects_prompts = has_hook(algorithm, "retrieve_prompt")
        self.settles = has_hook(algorithm, "settle")
        self._is_told = has_hook(algorithm, "truncated")
        self.settle_whole = algorithm.spec().settle_whole
        model, requests = config.model, config.max_requests
        heads, dim, self._last_weights = model.num_heads, model.head_dim, None
        if indexed and model.indexer is not None:
            heads, dim = model.indexer.num_heads, model.indexer.head_dim
            self._last_weights = torch.zeros((requests, heads), device=device)
        self._last_queries = torch.zeros((requests, heads, dim), dtype=model.dtype, device=device)

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        """Follow the new token of each row and select for it. Hot.

        Args:
            q: ``[B, H, D]``.
            k, v: ``[B, Hkv, D]``.
            index: of the rows, where the algorithm goes by the model's indexer.
        """
        queries, keys, weights = self._inputs(q, k, index)
        self.algorithm.update(self.view, keys, v)
        self._retrieve(queries.unsqueeze(1), weights)

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
            lse: fp32 ``[c, H]``.
        """
        queries, keys, weights = self._inputs(q, k, index)
        self.algorithm.construct(self.view, slot, start, keys, v, queries, lse)
        self._remember(slot, queries, weights)

    def select_prompt(
        self, slot: int, start: int, q: Tensor, k: Tensor, v: Tensor, index: Index | None
    ) -> Tensor | None:
        """Represent a chunk and select for its rows; None where they see everything. Cold.

        Returns:
            int32 ``[m, K]``.
        """
        queries, keys, weights = self._inputs(q, k, index)
        no_lse = torch.empty((0, q.shape[1]), device=q.device)
        self.algorithm.construct(self.view, slot, start, keys, v, queries, no_lse)
        self._remember(slot, queries, weights)
        ids = self.lanes.prompts[slot] = None  # frees what the layer before has selected
        if start + len(q) > self.view.group.select:
            shape = (len(q), self.view.group.select)
            ids = torch.empty(shape, dtype=torch.int32, device=q.device)
            self.algorithm.retrieve_prompt(self.view, slot, start, queries, weights, ids)
        self.lanes.prompts[slot] = ids
        return ids

    def warm(self) -> None:
        """Select by the last query of each row's prompt. The rows append nothing."""
        slots, weights = self.view.step.slots, self._last_weights
        queries = self._last_queries.index_select(0, slots).unsqueeze(1)
        self._retrieve(queries, None if weights is None else weights.index_select(0, slots))

    def settle(self, slot: int, since: int, length: int, history: History) -> None:
        """Close a prompt or a period. Cold."""
        self.algorithm.settle(self.view, slot, since, length, history)

    def truncated(self, slot: int, length: int) -> None:
        """The request has lost its tokens from ``length`` on. Cold."""
        if self._is_told:
            self.algorithm.truncated(self.view, slot, length)

    def copy(self, slot: int, twin: int) -> None:
        """Let a fork start as warm as its request."""
        for kept in (self._last_queries, self._last_weights):
            if kept is not None:
                kept[twin] = kept[slot]

    def _inputs(
        self, q: Tensor, k: Tensor, index: Index | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and weights that the algorithm is given."""
        if not self.indexed:
            return q, k, None
        if index is None:
            raise RequestError(
                f"layer {self.view.layer} was given no index and selects by it; hand over what "
                "the model's indexer made of the rows"
            )
        return index.q, index.k.unsqueeze(1), index.weights

    def _retrieve(self, queries: Tensor, weights: Tensor | None) -> None:
        self.algorithm.retrieve_topk(self.view, queries, weights, self.lanes.ids)

    def _remember(self, slot: int, queries: Tensor, weights: Tensor | None) -> None:
        self._last_queries[slot] = queries[-1]
        if self._last_weights is not None and weights is not None:
            self._last_weights[slot] = weights[-1]


class Regranulated(Own):
    """The layer's algorithm selects tokens; the units that hold them are attended.

    Args:
        extra: int64 ``[R]`` see ``GroupStore.extra``.
        others: as of ``Own``.
    """

    def __init__(self, *others: Any, extra: Tensor) -> None:
        super().__init__(*others)
        assert self.lanes.tokens is not None
        self.extra, self.tokens = extra, self.lanes.tokens

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        """Select, and count what is attended beyond it. Hot."""
        super().select(q, k, v, index)
        self.tokens.count(self.extra)

    def _retrieve(self, queries: Tensor, weights: Tensor | None) -> None:
        self.algorithm.retrieve_topk(self.view, queries, weights, self.tokens.ids)
        self.tokens.regranulate(self.lanes.limit, self.lanes.ids)


Selector = Own | Shared
