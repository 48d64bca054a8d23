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
from topkv_authoring.selectors import KeepsUnits, closed_units, host_ids, key_refusals
from topkv_residual import reference

MOST_HEADS = 64
"""Most query heads of a kv-head, in all queries of a row, that a program of the kernels holds."""


class Residual(KeepsUnits):
    """Adds every closed unit that was not attended, as one weighted mean value.

    Of every unit and kv-head it keeps the mean key and the mean value, in the dtype of the model.
    What the tokens of a unit weigh together follows from them: see ``reference.logits``. The sum
    over all closed units that the selection does not hold is added to the attended output by
    log-sum-exp.

    Where keys and values within a unit are equal the estimate is exact, up to rounding, and the
    result is attention to everything. Where nothing is left out nothing changes, to the bit.
    What is kept is a function of the keys and values of a unit alone. Both are finite. To each of
    several queries of a row the same units are added, those before the tokens that it appends.
    """

    keeps_values = True

    def __init__(self, setup: StageSetup) -> None:
        """Raise ConfigError with all reasons."""
        self.model, self.group = setup.model, setup.group
        reasons = key_refusals(self.model, self.group, "means are")
        heads, most = self.model.group_size, setup.max_queries
        if most > 1 and heads * most > MOST_HEADS:
            reasons.append(
                f"a kv-head may have at most {MOST_HEADS} query heads, of all queries of a row, "
                f"got {heads * most}; lower max_queries"
            )
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
        there = unit < closed_units(layer)[:, None]
        real = torch.arange(q.shape[1], device=q.device) < step.appended.clamp(min=1)[:, None]
        real = self._by_heads(real[..., None].expand(q.shape[:3]))
        held = (selection.ids[:, :, None] == unit).any(1).unflatten(0, (-1, group.lane_heads))
        left = (there[:, None] & ~held).repeat_interleave(real.shape[1] // group.lane_heads, 1)
        left &= real[..., None]
        at = host_ids(layer, step.slots.clamp(min=0)[:, None], torch.where(there, unit, 0))
        mean, value = layer.pools["means"][at].unbind(3)
        weights = self.weights(self._by_heads(q), mean)
        added = reference.add(self._by_heads(out), self._by_heads(lse), weights, value, left)
        new, total, some = (self._by_queries(x, q.shape[1]) for x in (*added, left.any(-1)))
        out.copy_(torch.where(some[..., None], new.to(out.dtype), out))
        lse.copy_(torch.where(some, total, lse))

    def _by_heads(self, x: Tensor) -> Tensor:
        """``[B, Hkv * Q * G, ...]`` of ``[B, Q, Hkv * G, ...]``: queries are further heads."""
        return x.unflatten(2, (self.model.num_kv_heads, -1)).transpose(1, 2).flatten(1, 3)

    def _by_queries(self, x: Tensor, queries: int) -> Tensor:
        """The reverse of ``_by_heads``."""
        return x.unflatten(1, (self.model.num_kv_heads, queries, -1)).transpose(1, 2).flatten(2, 3)
