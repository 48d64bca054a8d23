"""InfLLM-v2: a block is worth the largest share of attention of a window of keys in it.

Zhao et al., "InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation",
2025, arXiv 2509.24663, as MiniCPM4 has it. Differences from its code are in the README.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv.types import LayerView
from topkv_authoring.selectors import RankedUnits, host_ids
from topkv_infllm_v2 import reference
from topkv_infllm_v2.entry import WindowParams


class InfLLMv2(RankedUnits):
    """Selects the closed units with the best windows of compressed keys.

    A window is ``2 stride`` neighbouring tokens and begins at every multiple of ``stride``; its
    compressed key is the mean of its keys. For each query head the logits of all windows of whole
    parts are softmaxed; a lane adds up the shares of its query heads, and a unit is worth the
    largest sum of the windows that share a token with it. Kept as its logarithm. In a lane of one
    query head a window is worth its logit.

    The mean key of each ``stride`` tokens and kv-head is kept, in the dtype of the model: the mean
    of a window is that of its two halves, and what a page keeps depends on its keys alone.
    The first ``sink_units`` units and the last ``recent_units`` closed ones are forced.

    Of equal scores the lower unit wins.
    """

    params: WindowParams

    def refusals(self) -> list[str]:
        stride, unit = self.stride, self.group.unit
        if unit % stride == 0:
            return []
        return [
            f"stride must be a number of tokens that divides a unit of {unit}, got {stride}; set "
            "unit to a multiple of it"
        ]

    @property
    def stride(self) -> int:
        return self.params.stride

    @property
    def parts(self) -> int:
        """Parts of a unit."""
        return self.group.unit // self.stride

    def representations(self) -> list[RepresentationSpec]:
        shape = self.group.num_kv_heads, self.parts, self.group.head_dim
        return [RepresentationSpec("means", "unit", shape, self.model.dtype)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"means": reference.part_means(keys, valid, self.stride)}

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        step, group = layer.step, self.group
        before = (step.lengths - step.appended.clamp(min=1)).clamp(min=0) * (step.slots >= 0)
        closed, parts = before // group.unit, before // self.stride
        unit = torch.arange(group.max_units, device=q.device)
        # Whole parts may be in the open unit; behind it stands no page, and unit 0 is read.
        there = unit * self.parts < parts[:, None]
        at = host_ids(layer, step.slots.clamp(min=0)[:, None], torch.where(there, unit, 0))
        means = layer.pools["means"][at].transpose(2, 3).flatten(1, 2)
        windows = reference.window_scores(q, means, parts, self.model.scale)
        windows = windows.masked_fill(~self.real_heads(layer, q)[..., None], float("-inf"))
        lanes = self.combine(windows.unflatten(1, (group.lane_heads, -1)))
        scores = reference.unit_scores(lanes, self.parts)
        forced = (unit < self.sink_units) | (unit >= closed[:, None] - self.recent_units)
        scores = scores.masked_fill(forced[:, None], float("inf"))
        return scores.flatten(0, 1), closed.int().repeat_interleave(group.lane_heads)
