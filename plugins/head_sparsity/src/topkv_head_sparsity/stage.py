"""Head sparsity as a stage: lanes whose attention is flat read a share of their selection.

Our reading of the "H-sparsity" that descriptions of SGLang's Double Sparsity mention; neither the
paper nor its code has it, and the README says what it rests on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSetup, StageSpec
from topkv.types import LayerView, Selection
from topkv_authoring.selectors import KeepsUnits, host_ids
from topkv_head_sparsity import reference


class HeadSparsity(KeepsUnits):
    """Drops most of the candidates of lanes whose attention is flat.

    Of each run of ``reference.RUN`` tokens it keeps the mean key in 4 bits a channel. What the
    tokens of a unit weigh together follows from the means of its runs. From the candidates, and
    from a sample of the closed units that are none, it estimates the entropy of attention over
    all closed units, see ``reference.weigh``. A lane is flat if the entropy of each of its query
    heads exceeds ``threshold`` of the maximum, and K does not cover its closed units. A flat lane
    keeps the ``head_budget`` of K that rank first, see ``reference.best``. Other lanes keep what
    they are given. What is kept stays at its place.

    With ``threshold`` or ``head_budget`` 1 the selection is what it would be without the stage.
    Codes are a function of the keys of a unit alone. Keys are finite, and below 2**125 in
    magnitude.

    Attributes:
        threshold: the parameter; infinite where it is 1, which rounding must not exceed.
        few: candidates that a flat lane keeps.
    """

    def __init__(self, setup: StageSetup) -> None:
        """Raise ConfigError for models with a softcap."""
        self.model, self.group = setup.model, setup.group
        if self.model.softcap is not None:
            reason = "logits are estimated without a cap, and the model has a softcap"
            raise ConfigError(type(self).__name__, [reason])
        threshold, share = setup.params.threshold, setup.params.head_budget
        self.threshold = threshold if threshold < 1 else math.inf
        self.few = math.ceil(share * self.group.select)

    def representations(self) -> list[RepresentationSpec]:
        heads, half = self.model.num_kv_heads, (self.model.head_dim + 1) // 2
        runs = -(-self.group.unit // reference.RUN)
        codes = RepresentationSpec("codes", "unit", (heads, runs, half), torch.uint8)
        return [codes, RepresentationSpec("scale", "unit", (heads, runs), torch.float32)]

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec(tuple(self.representations()))

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        codes, scale = reference.encode(reference.means(keys, valid))
        return {"codes": codes, "scale": scale}

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        step, group = layer.step, self.group
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        closed = closed.repeat_interleave(group.lane_heads)
        # In ascending order, so that of equal ranks the lower unit is kept.
        absent, offered = group.max_units, candidates.ids.shape[1]
        units, order = torch.where(candidates.ids < 0, absent, candidates.ids).sort(1)
        others, there = reference.sample(closed)
        there = torch.cat([units < absent, there & ~self._offered(others, units)], 1)
        units = torch.where(there, torch.cat([units, others], 1), 0)
        worth = self.worth(layer, q[:, 0], units).masked_fill(~there[:, None], float("-inf"))
        flatness, whole = self.weigh(worth, offered, closed)
        flat = (flatness > self.threshold) & (closed > group.select)
        keep = reference.best(worth[..., :offered], whole, self.few) | ~flat[:, None]
        keep = torch.zeros_like(keep).scatter(1, order, keep)
        out.ids.fill_(-1)
        out.ids[:, :offered] = torch.where(keep, candidates.ids, -1)
        return out

    @staticmethod
    def _offered(others: Tensor, units: Tensor) -> Tensor:
        """True for units of the sample that are candidates, bool ``[N, SAMPLE]``."""
        return (others[:, :, None] == units[:, None]).any(2)

    def weigh(self, worth: Tensor, offered: int, closed: Tensor) -> tuple[Tensor, Tensor]:
        """Return how flat lanes are, see ``reference.weigh``."""
        return reference.weigh(worth, offered, closed)

    def worth(self, layer: LayerView, q: Tensor, units: Tensor) -> Tensor:
        """Logarithms of what the tokens of ``units [N, P]`` weigh, fp32 ``[N, h, P]``.

        Over the tokens of a run it is at least the logit of their mean and the logarithm of their
        count (Jensen).
        """
        group, lanes = self.group, self.group.lane_heads
        at = host_ids(
            layer, layer.step.slots.clamp(min=0).repeat_interleave(lanes)[:, None], units
        )
        means = reference.decode(
            layer.pools["codes"][at], layer.pools["scale"][at], self.model.head_dim
        )
        # Of all kv-heads those of the lane itself: [B, lane, P, heads, R, D].
        means = means.unflatten(0, (-1, lanes)).unflatten(3, (lanes, -1))
        means = means.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        queries = q.float().unflatten(1, (lanes, group.heads_per_lane, -1))
        logits = torch.einsum("blhgd,blphrd->blhgpr", queries, means) * self.model.scale
        first = torch.arange(0, group.unit, reference.RUN, device=q.device)
        logits = logits + (group.unit - first).clamp(max=reference.RUN).log()
        return logits.logsumexp(-1).flatten(2, 3).flatten(0, 1)
