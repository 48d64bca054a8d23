"""Retrieval ahead of time: a step attends to what the query of the step before it selects.

What a layer is to attend to in a step is known when the step begins, and lies on the device: after
its attention the layer selects for the next step, and copies what that will miss, on a stream
beside the one that goes on with the model. Selections are a step old, so that outputs are other
ones: queries of adjacent steps are alike, and how much that costs has to be measured. A unit that
closed since is attended in any case, and so is the open one.

The query of the step before stands for that of the step as in "Hierarchical Sparse Attention" of
SGLang ("asynchronous retrieval") and FreeKV (Liu et al. 2025, arXiv 2505.13109), which falls back
to the query itself where the two differ much; a captured step cannot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.algorithm import Algorithm
from topkv.lanes import LaneBuffers
from topkv.loads import Loads
from topkv.ops import carried
from topkv.plugins.contract import has_hook
from topkv.selectors import Own
from topkv.types import Index, LayerView


class Carrying(Own):
    """The layer's algorithm selects for the next step of each request.

    Args:
        config, view, lanes, algorithm, indexed: as of ``Own``.

    Attributes:
        loads: what brings the units of the next step, see ``topkv.loads``.

    Raises:
        ConfigError: what is selected in a step is read after its attention, or units are
            numbered anew between steps.
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
        reasons = []
        if has_hook(algorithm, "correct"):
            reasons.append("corrects for what was not attended, by the query of the step itself")
        if getattr(algorithm, "keeping", None) is not None:
            reasons.append("gives back pages, and those behind are numbered anew")
        if reasons:
            raise ConfigError(
                CONFIG_REFUSED,
                [
                    f"ahead=True, and what selects in layer {view.layer} {why}; leave ahead or "
                    "that stage out"
                    for why in reasons
                ],
            )
        shape, device = (view.group.max_lanes, view.group.select), view.step.slots.device
        self._kept = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._coming = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._impl = config.impl

    @property
    def coming(self) -> Tensor:
        """int32 ``[N, K]`` what the rows of this step have selected for the next."""
        return self._coming[: len(self.lanes.ids)]

    def select(self, q: Tensor, k: Tensor, v: Tensor, index: Index | None) -> None:
        self._inputs(q, k, index)  # refuses an index
        self.algorithm.update(self.view, k, v)
        slots, lanes = self.view.step.slots, self.lanes
        carried.take(self._kept, slots, lanes.limit, lanes.ids, impl=self._impl)

    def correct(self, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Select for the next step, once this one has attended; ``out`` stays as it is. Hot."""
        with self.lanes.side.behind(q):
            self.retrieve(q)
            self.keep(self.coming)
            self.loads.plan()
            self.loads.load()

    def retrieve(self, q: Tensor) -> None:
        """Select by ``q [B, 1, H, D]``, to ``coming``. Hot."""
        self.algorithm.retrieve_topk(self.view, q, None, self.coming)

    def warm(self) -> None:
        super().warm()
        self.keep(self.lanes.ids)

    def keep(self, ids: Tensor) -> None:
        """Keep ``ids [N, K]`` of the rows for their next step. Hot."""
        carried.keep(ids, self.view.step.slots, self._kept, impl=self._impl)

    def kept(self) -> dict[str, Tensor]:
        by_slot = self._kept.unflatten(0, (-1, self.view.group.lane_heads))
        return {**super().kept(), "coming": by_slot}
