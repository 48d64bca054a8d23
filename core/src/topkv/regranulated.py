"""Selectors of layers whose algorithm selects tokens and whose cache holds larger units.

The selected tokens become the units that hold them (``topkv.ops.regranulate``). Tokens that a
layer attends beyond its selection are counted.
"""

from __future__ import annotations

from torch import Tensor

from topkv.config import LoweredConfig
from topkv.hooks.algorithm import Algorithm
from topkv.lanes import LaneBuffers
from topkv.ops.regranulate import TokenSelection
from topkv.selectors import Own, Selector
from topkv.types import Index, LayerView, Selection


class Regranulated(Own):
    """Selector of a layer whose own algorithm selects tokens.

    Args:
        config, view, lanes, algorithm, indexed: as of ``Own``.
        tokens: the selected tokens; shared by the layers of the group.
        extra: int64 ``[max_lanes]``, see ``GroupStore.extra``.
    """

    def __init__(
        self,
        config: LoweredConfig,
        view: LayerView,
        lanes: LaneBuffers,
        algorithm: Algorithm,
        indexed: bool,
        tokens: TokenSelection,
        extra: Tensor,
    ) -> None:
        super().__init__(config, view, lanes, algorithm, indexed)
        self.tokens, self.extra = tokens, extra

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> Selection:
        selection = super().select(q, k, v, index)
        self.tokens.count(self.extra)
        return selection

    def _retrieve(self, queries: Tensor, weights: Tensor | None) -> Selection:
        tokens, lanes = Selection(self.tokens.ids), self.lanes
        self.algorithm.retrieve_topk(self.view, queries, weights, tokens)
        self.tokens.regranulate(lanes.limit, lanes.room.ids)
        lanes.selection = lanes.room
        return lanes.room


class SharedRegranulated(Selector):
    """Selector of a layer that shares the tokens of a layer before it, extra tokens included.

    Args:
        view, lanes, selects_prompts: as of ``Selector``.
        tokens, extra: as of ``Regranulated``.
    """

    def __init__(
        self,
        view: LayerView,
        lanes: LaneBuffers,
        selects_prompts: bool,
        tokens: TokenSelection,
        extra: Tensor,
    ) -> None:
        super().__init__(view, lanes, selects_prompts)
        self.tokens, self.extra = tokens, extra

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> Selection:
        selection = super().select(q, k, v, index)
        self.tokens.count(self.extra)
        return selection
