"""Small, real stages, and an algorithm that offers candidates to one."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, field, frozen
from attrs.validators import ge
from torch import Tensor

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.hooks.stage import StageSetup, StageSpec
from topkv.parameters import values
from topkv.plugins.discovery import hookimpl
from topkv.types import GroupShape, LayerView, Selection
from topkv_authoring.selectors import closed_units, host_ids
from topkv_dropping.dropping import Keeping
from topkv_dropping.stage import ScoresPages

EVERY = 4
"""``Offered`` leaves one place in ``EVERY`` empty."""


class Keep:
    """Leaves all candidates."""

    def __init__(self, setup: StageSetup) -> None:
        self.setup = setup

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec()

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        out.ids.copy_(candidates.ids)
        return out


class ToUnits(Keep):
    """Turns tokens into the closed units that hold them, ascending, and loses none."""

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        group, absent = self.setup.group, self.setup.group.max_units
        units = torch.where(candidates.ids < 0, absent, candidates.ids // group.unit)
        inside = units < closed_units(layer).repeat_interleave(group.lane_heads)[:, None]
        units = torch.where(inside, units, absent).sort(1).values
        units[:, 1:][units[:, 1:] == units[:, :-1]] = absent
        units = units.sort(1).values[:, : out.ids.shape[1]]
        out.ids.copy_(torch.where(units < absent, units, -1))
        return out


class Rerank:
    """Leaves the candidates with the largest product of a key and a query of their lane.

    It keeps every key as it is, and of equal units leaves the lower. ``widen`` is a parameter.

    Attributes:
        kept: names of the pools that have keys, and values if there is a second one.
    """

    kept: tuple[str, ...] = ("keys",)

    def __init__(self, setup: StageSetup) -> None:
        self.model, self.group, self.widen = setup.model, setup.group, setup.params.widen

    def representations(self) -> list[RepresentationSpec]:
        shape, dtype = (self.model.num_kv_heads, self.model.head_dim), self.model.dtype
        return [RepresentationSpec(name, "token", shape, dtype) for name in self.kept]

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec(tuple(self.representations()), self.widen)

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        at = self._rows(layer, slot, torch.arange(start, start + len(k), device=k.device))
        for name, rows in zip(self.kept, (k, v), strict=False):
            layer.pools[name][at] = rows

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step = layer.step
        writes = (step.appended != 0) & (step.slots >= 0)
        tokens = (step.lengths - 1).clamp(min=0)
        # Rows that append nothing write row 0, which belongs to nobody, and what it holds.
        at = torch.where(writes, self._rows(layer, step.slots.clamp(min=0), tokens), 0)
        for name, rows in zip(self.kept, (k[:, 0], v[:, 0]), strict=False):
            pool = layer.pools[name]
            pool[at] = torch.where(writes[:, None, None], rows, pool[at])

    def _rows(self, layer: LayerView, slots: Tensor | int, tokens: Tensor) -> Tensor:
        unit = self.group.unit
        return host_ids(layer, slots, tokens // unit) * unit + tokens % unit

    @hookimpl
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        absent = self.group.max_units
        units = torch.where(candidates.ids < 0, absent, candidates.ids).sort(1).values
        there = units < absent
        scores = self._scores(layer, q, units * there).masked_fill(~there, float("-inf"))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : out.ids.shape[1]]
        out.ids.fill_(-1)
        left = torch.where(there, units, -1).gather(1, best)
        out.ids[:, : left.shape[1]] = left
        return out

    def _scores(self, layer: LayerView, q: Tensor, units: Tensor) -> Tensor:
        """Score units, fp32 ``[N, K']``: the largest product of a key of the unit and a query."""
        group, lanes = self.group, self.group.lane_heads
        slots = layer.step.slots.clamp(min=0).repeat_interleave(lanes)[:, None, None]
        tokens = units[..., None] * group.unit + torch.arange(group.unit, device=q.device)
        keys = layer.pools["keys"][self._rows(layer, slots, tokens)]
        # [B, lane, K', unit, heads of a lane, D], of the lane itself.
        keys = keys.unflatten(0, (-1, lanes)).unflatten(4, (lanes, -1))
        keys = keys.diagonal(dim1=1, dim2=4).movedim(-1, 1)
        queries = q[:, 0].unflatten(1, (lanes, group.heads_per_lane, -1))
        products = torch.einsum("blhgd,blkuhd->blkuhg", queries.float(), keys.float())
        return products.flatten(3).amax(3).flatten(0, 1)


class KeepKeys(Rerank):
    """Leaves all candidates, whatever they are, and keeps every key."""

    refine = Keep.refine


class Heavy(ScoresPages, Rerank):
    """Scores pages by the sum of squares of their keys in one channel, over the heads of a lane;
    the channel moves on with each page of the position.

    It keeps every key. Parameters are those of ``Keeping``.
    """

    def __init__(self, setup: StageSetup) -> None:
        self.model, self.group = setup.model, setup.group
        self.keeping = Keeping(**values(setup.params))

    representations = Rerank.representations
    refine: Any = None

    def keep(
        self, layer: LayerView, slot: int, length: int, position: int, scores: Tensor
    ) -> None:
        lanes, pages = scores.shape
        page = self.group.unit * self.group.units_per_page
        tokens = torch.arange(pages * page, device=scores.device)
        keys = layer.pools["keys"][self._rows(layer, slot, tokens)].float()
        channel = keys[:, :, position // page % self.model.head_dim]
        squares = channel.square().unflatten(1, (lanes, -1)).sum(2)
        scores.copy_(squares.unflatten(0, (pages, page)).sum(1).T)


class Complete(Rerank):
    """Keeps every key and value, and adds the closed units that were not attended, exactly.

    With it any selection gives what attention to everything gives.
    """

    kept = ("keys", "values")

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec(tuple(self.representations()))

    refine: Any = None

    @hookimpl
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        group, lanes = self.group, self.group.lane_heads
        slots = layer.step.slots.clamp(min=0)[:, None]
        tokens = torch.arange(group.max_units * group.unit, device=q.device)
        unit = tokens // group.unit
        closed = closed_units(layer)
        held = (selection.ids[:, :, None] == unit).any(1).unflatten(0, (-1, lanes))
        left = (unit < closed[:, None])[:, None] & ~held
        left = left.repeat_interleave(q.shape[2] // lanes, 1)
        at = self._rows(layer, slots, tokens * (unit < closed[:, None]))
        k, v = (
            layer.pools[name][at].double().repeat_interleave(self.model.group_size, 2)
            for name in ("keys", "values")
        )
        logits = torch.einsum("bhd,bnhd->bhn", q[:, 0].double(), k) * self.model.scale
        logits = logits.masked_fill(~left, -torch.inf)
        part_lse = logits.logsumexp(-1)
        part = torch.einsum("bhn,bnhd->bhd", logits.softmax(-1).nan_to_num(), v.nan_to_num())
        there = part_lse > -torch.inf
        total = torch.logaddexp(lse[:, 0].double(), part_lse)
        share, rest = ((each - total).exp()[..., None] for each in (lse[:, 0].double(), part_lse))
        merged = share * out[:, 0].double() + rest * part
        out[:, 0] = torch.where(there[..., None], merged, out[:, 0].double()).to(out.dtype)
        lse[:, 0] = torch.where(there, total, lse[:, 0].double()).float()


def products(bench: Any, slot: int, q: Tensor) -> Tensor:
    """Scores of ``Rerank``, in float64 and from the keys themselves.

    Args:
        bench: an ``AlgorithmBench``.
        slot: request slot.
        q: ``[1, H, D]``.

    Returns:
        ``[lane_heads, units]``, of the selectable ones.
    """
    group, keys = bench.group, bench.keys[slot].double()
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    worth = torch.einsum("hgd,nhd->hgn", heads, keys).amax(1)
    worth = worth.unflatten(0, (group.lane_heads, -1)).amax(1)
    closed = bench.selectable(slot)
    best: Tensor = worth[:, : closed * group.unit].unflatten(1, (closed, group.unit)).amax(2)
    return best


class Offered:
    """An algorithm that offers the newest closed units, with gaps, or the units of a test.

    Attributes:
        next_ids: units that it offers, int32 ``[N, K']``; None for the newest units.
    """

    def __init__(self, group: GroupShape) -> None:
        self.group, self.next_ids = group, None

    next_ids: Tensor | None

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec()

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        pass

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        pass

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        if self.next_ids is not None:
            out.ids.copy_(self.next_ids)
            return out
        place = torch.arange(out.ids.shape[1], device=out.ids.device)
        closed = closed_units(layer).repeat_interleave(self.group.lane_heads)[:, None]
        units = closed - 1 - place
        out.ids.copy_(torch.where((units >= 0) & (place % EVERY != 1), units, -1))
        return out


class Everything(Offered):
    """Selects all closed units that there is room for."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup.group)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        units = torch.arange(out.ids.shape[1], device=out.ids.device)
        closed = closed_units(layer).repeat_interleave(self.group.lane_heads)[:, None]
        out.ids.copy_(torch.where(units < closed, units, -1))
        return out


KEEP = PluginEntry(
    "keep",
    "stage",
    "topkv_testing.models.stage_doubles:Keep",
    capabilities=Capabilities(attention=("gqa", "mla")),
)

TO_UNITS = PluginEntry(
    "to_units",
    "stage",
    "topkv_testing.models.stage_doubles:ToUnits",
    capabilities=Capabilities(attention=("gqa", "mla"), regrains=True),
)


@frozen
class RerankParams:
    """Parameters.

    Attributes:
        widen: candidates for each unit of a selection.
    """

    widen: int = field(default=4, validator=ge(1))


@frozen
class CompleteParams:
    """Parameters, as of ``RerankParams``."""

    widen: int = field(default=1, validator=ge(1))


@frozen
class HeavyParams:
    """Parameters, those of ``Keeping``."""

    tokens: int = 16
    every: int = 4
    first: int = 0
    recent: int = 4


RERANK = PluginEntry(
    "rerank_exact",
    "stage",
    "topkv_testing.models.stage_doubles:Rerank",
    capabilities=Capabilities(traits=("exact_update", "scale_free", "head_equivariant")),
    parameters=RerankParams,
)

COMPLETE = evolve(
    RERANK,
    name="complete",
    factories="topkv_testing.models.stage_doubles:Complete",
    capabilities=Capabilities(traits=("exact_update", "head_equivariant")),
    parameters=CompleteParams,
)

KEEP_KEYS = evolve(
    RERANK,
    name="keep_keys",
    factories="topkv_testing.models.stage_doubles:KeepKeys",
    parameters=CompleteParams,
)

HEAVY = evolve(
    RERANK,
    name="heavy",
    factories="topkv_testing.models.stage_doubles:Heavy",
    capabilities=Capabilities(traits=("exact_update", "head_equivariant")),
    parameters=HeavyParams,
)

EVERYTHING = PluginEntry(
    "everything", "algorithm", "topkv_testing.models.stage_doubles:Everything"
)
