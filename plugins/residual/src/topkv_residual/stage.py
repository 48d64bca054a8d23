"""The tail of attention as a stage: units that no selection holds, by their means.

RetroInfer's estimation zone (Chen et al., arXiv 2505.02922) over the units of any selector.
Differences from its code are in the README.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSetup, StageSpec
from topkv.types import LayerView, Selection
from topkv_authoring.selectors import KeepsUnits, host_ids, key_refusals
from topkv_residual import reference


class Residual(KeepsUnits):
    """Adds every closed unit that was not attended, as one weighted mean value.

    Of every unit and kv-head it keeps the mean key and the mean value, in the dtype of the model.
    What the tokens of a unit weigh together follows from them: see ``reference.logits``. The sum
    over all closed units that the selection does not hold is added to the attended output by
    log-sum-exp.

    Where keys and values within a unit are equal the estimate is exact, up to rounding, and the
    result is attention to everything. Where nothing is left out nothing changes, to the bit.
    What is kept is a function of the keys and values of a unit alone. Both are finite.
    """

    keeps_values = True

    def __init__(self, setup: StageSetup) -> None:
        """Raise ConfigError with all reasons."""
        self.model, self.group = setup.model, setup.group
        reasons = key_refusals(self.model, self.group, "means are")
        if self.model.softcap is not None:
            reasons.append("logits are estimated without a cap, and the model has a softcap")
        if self.model.out_dim != self.model.head_dim:
            reasons.append(
                f"values of {self.model.out_dim} elements are not supported beside keys of "
                f"{self.model.head_dim}"
            )
        if reasons:
            raise ConfigError(type(self).__name__, reasons)

    def representations(self) -> list[RepresentationSpec]:
        heads, dim, dtype = self.model.num_kv_heads, self.model.head_dim, self.model.dtype
        return [RepresentationSpec("means", "unit", (heads, 2, dim), dtype)]

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec(tuple(self.representations()))

    def represent(  # type: ignore[override]  # values come along
        self, keys: Tensor, values: Tensor, valid: Tensor
    ) -> dict[str, Tensor]:
        return {"means": torch.stack(reference.summary(keys, values, valid), 2)}

    def weights(self, q: Tensor, mean: Tensor) -> Tensor:
        """Logarithms of what units weigh, see ``reference.logits``."""
        return reference.logits(q, mean, self.group.unit, self.model.scale)

    @hookimpl
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        group, step = self.group, layer.step
        unit = torch.arange(group.max_units, device=q.device)
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        there = unit < closed[:, None]
        held = (selection.ids[:, :, None] == unit).any(1).unflatten(0, (-1, group.lane_heads))
        left = (there[:, None] & ~held).repeat_interleave(q.shape[2] // group.lane_heads, 1)
        at = host_ids(layer, step.slots.clamp(min=0)[:, None], torch.where(there, unit, 0))
        mean, value = layer.pools["means"][at].unbind(3)
        weights = self.weights(q[:, 0], mean)
        new, total = reference.add(out[:, 0], lse[:, 0], weights, value, left)
        some = left.any(-1)
        out[:, 0] = torch.where(some[..., None], new.to(out.dtype), out[:, 0])
        lse[:, 0] = torch.where(some, total, lse[:, 0])
