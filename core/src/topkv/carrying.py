"""Selection one step ahead: a step attends to what the query of the step before selected.

The selection of a layer is known when a step begins, and is on the device: after its attention
the layer selects for the next step, and copies the units that will be missed, on a stream
beside the one that goes on with the model. Selections are a step old, so that outputs are other
ones: queries of adjacent steps are alike, and how much that costs has to be measured. The unit
that closed last is attended in any case, and so is the open one.

Nothing is kept before ``forward_end``, so that a step which is dropped leaves no trace.

The query of the step before stands for that of the step as in "Hierarchical Sparse Attention" of
SGLang ("asynchronous retrieval") and FreeKV (Liu et al. 2025, arXiv 2505.13109), which falls back
to the query itself where the two differ much; a captured step cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.algorithm import Algorithm
from topkv.lanes import LaneBuffers
from topkv.loads import Loads
from topkv.selectors import Own
from topkv.types import Index, LayerView


class Carrying(Own):
    """The layer's algorithm selects for the next step of each request.

    Args:
        config, view, lanes, algorithm, indexed: as of ``Own``.

    Attributes:
        loads: plans and loads of the next step, see ``topkv.loads``.

    Raises:
        ConfigError: the selection of a step is read after its attention.
    """

    loads: Loads

    def __init__(
        self,
        config: LoweredConfig,
        view: LayerView,
        lanes: LaneBuffers,
        algorithm: Algorithm,
        indexed: bool,
    ) -> None:
        super().__init__(config, view, lanes, algorithm, indexed)
        if self._corrects:
            raise ConfigError(
                CONFIG_REFUSED,
                [
                    f"ahead=True, and what selects in layer {view.layer} corrects for what was "
                    "not attended, by the query of the step itself; leave ahead or that stage out"
                ],
            )
        if lanes.carried is None:
            raise RuntimeError("the buffers of the group have no room for a next step")
        self.carried = lanes.carried
        self._queries = torch.zeros_like(self._last_queries)  # by row

    @property
    def coming(self) -> Tensor:
        """Selections of this step's rows for the next one, int32 ``[N, K - 1]``."""
        return self.carried.coming(self.view.index, len(self.lanes.ids))

    def in_plan(self) -> Tensor:
        """Return ``coming`` as int32 ``[N, K]``, until another layer asks. Hot."""
        return self.carried.in_plan(self.view.index, len(self.lanes.ids))

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        self._inputs(q, k, index)  # refuses an index
        self.algorithm.update(self.view, k, v)
        self._take()

    def correct(self, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Select for the next step, once this one has attended; ``out`` stays as it is. Hot."""
        queries = self._queries[: len(q)].unsqueeze(1)
        queries.copy_(q)  # the model may write over its own before they are read
        with self.lanes.side.behind():
            self.retrieve(queries)
            self.loads.plan()
            self.loads.load()

    def retrieve(self, q: Tensor) -> None:
        """Select by ``q [B, 1, H, D]``, to ``coming``. Hot."""
        self.algorithm.retrieve_topk(self.view, q, None, self.coming)

    def construct(self, *arguments: Any) -> None:
        self.lanes.side.join()  # an algorithm may use one scratch for prompts and steps
        super().construct(*arguments)

    def warm(self) -> None:
        super().warm()
        self.keep()

    def keep(self) -> None:
        """Keep ``coming`` and take it, outside of steps."""
        self.carried.keep(self.view.step.slots, self.view.index)
        self._take()

    def kept(self) -> dict[str, Tensor]:
        by_slot = self.carried.kept[self.view.index].unflatten(0, (-1, self.view.group.lane_heads))
        return {**super().kept(), "coming": by_slot}

    def _take(self) -> None:
        lanes = self.lanes
        self.carried.take(self.view.index, self.view.step.slots, lanes.limit, lanes.ids)

    def _retrieve(self, queries: Tensor, weights: Tensor | None) -> None:
        self.retrieve(queries)
