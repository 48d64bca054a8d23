"""A unit is worth what its mean key is to the query head that likes it best.

Everything but the method is in the base class: where units lie, prompts, decode steps, forced
units and the top-k. Shapes: n units or B rows in front, Hkv kv-heads, H query heads, D head dim,
U = ``group.max_units``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv_authoring.selectors import ScoredUnits


class MinimalAlgorithm(ScoredUnits):
    """Selects the closed units of the largest ``max_h q_h . mean(k)``, in fp32.

    The maximum is over the query heads of a lane. The first ``sink_units`` units are forced; of
    equal scores the lower unit wins.
    """

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.group.num_kv_heads, self.group.head_dim)
        return [RepresentationSpec("mean", "unit", shape, torch.float32)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        # What is behind the valid keys (NaN, say) has no influence.
        total = torch.where(valid[:, :, None, None], keys.float(), 0).sum(1)
        return {"mean": total / valid.sum(1)[:, None, None]}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        grouped = q.float().unflatten(1, (self.group.num_kv_heads, -1))
        return torch.einsum("bhgd,buhd->bhgu", grouped, kept["mean"]).flatten(1, 2)

    def combine(self, scores: Tensor) -> Tensor:
        """The largest score of the query heads ``[B, lane_heads, H / lane_heads, U]``."""
        return scores.amax(2)
