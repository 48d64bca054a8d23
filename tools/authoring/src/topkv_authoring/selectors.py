"""Shared by algorithms and stages: units of chunks and rings, and base classes that rank them.

Letters: n units, B rows, H query heads, Hkv kv-heads, D head dim, U = ``group.max_units``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.plugins.discovery import hookimpl
from topkv.types import GroupShape, LayerView, ModelShape, Selection
from topkv_authoring import sticky
from topkv_authoring.contract import broken_contract


def host_ids(layer: LayerView, slots: Tensor | int, units: Tensor | int) -> Tensor:
    """Host ids of logical units: their rows in the pools of grain ``"unit"``, int64.

    In a group of units of one token they are the rows of the pools of grain ``"token"`` as well.

    Args:
        layer: whose page table and group hold.
        slots: request slots, 0 or more.
        units: logical ids, 0 or more; ``slots`` and ``units`` broadcast. A unit for which its
            request has no page is looked for on host page 0, which belongs to nobody.
    """
    per_page = layer.group.units_per_page
    return layer.step.page_table[slots, units // per_page].long() * per_page + units % per_page


def chunk_units(group: GroupShape, start: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt chunk in units, as ``construct`` is given it.

    Args:
        start: position of the first row, on a boundary of units.
        rows: ``[m, Hkv, D]`` keys or values.

    Returns:
        int64 ``[n]`` logical units; their rows ``[n, unit, Hkv, D]``, contiguous, 0 behind the
        last one; and bool ``[n, unit]``, which of them are there.
    """
    first = torch.arange(0, len(rows), group.unit, device=rows.device)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, len(first) * group.unit - len(rows)))
    padded = padded.contiguous()
    valid = first[:, None] + torch.arange(group.unit, device=rows.device) < len(rows)
    return (start + first) // group.unit, padded.unflatten(0, (len(first), group.unit)), valid


def appended_units(layer: LayerView, tokens: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Units that rows append to, which ``update`` has to represent anew.

    Args:
        layer: the layer.
        tokens: Q, the most that a row appends. They lie in at most ``n`` units of a row.

    Returns:
        int32 ``[B * n]`` request slots, -1 where nothing changes; int32 ``[B * n]`` logical units;
        and bool ``[B * n, unit]``, which of their tokens are there.
    """
    step, unit = layer.step, layer.group.unit
    newest = (step.lengths - 1).clamp(min=0)
    first = (step.lengths - step.appended.clamp(min=1)).clamp(min=0) // unit
    nth = torch.arange(touched(unit, tokens), dtype=torch.int32, device=newest.device)
    units = first[:, None] + nth
    last = (newest // unit)[:, None]
    writes = (step.appended != 0)[:, None] & (units <= last)
    slots = torch.where(writes, step.slots[:, None], -1).flatten()
    units = torch.minimum(units, last)  # behind the last one may stand no page
    place = units[..., None] * unit + torch.arange(unit, device=newest.device)
    return slots, units.flatten(), (place <= newest[:, None, None]).flatten(0, 1)


def closed_units(layer: LayerView) -> Tensor:
    """Closed units of each row, int32 ``[B]``, before those that its new tokens are in; 0 of
    padded rows."""
    step = layer.step
    first = (step.lengths - step.appended.clamp(min=1)).clamp(min=0)
    return first // layer.group.unit * (step.slots >= 0)


def touched(unit: int, tokens: int) -> int:
    """Count the units that may get some of ``tokens`` adjacent tokens."""
    return 1 + (tokens - 2 + unit) // unit


def ring_units(layer: LayerView, ring: Tensor, slots: Tensor, units: Tensor) -> Tensor:
    """Rows ``[n, unit, Hkv, D]`` of units that are in ``layer.ring_k`` or ``ring_v``.

    Contiguous, as those of ``chunk_units`` are: in which order a sum over tokens adds depends on
    strides, and so would the bits of what is kept of a prompt and of decoded tokens.

    Args:
        slots, units: ``[n]`` request slots, any ring for -1, and logical units.
    """
    held = ring[slots.clamp(min=0), :, units % layer.group.ring_slots]
    # From [n, lane_heads, heads_per_lane, unit, D].
    return held.flatten(1, 2).transpose(1, 2).contiguous()


def write_units(layer: LayerView, slots: Tensor, units: Tensor, new: Mapping[str, Tensor]) -> None:
    """Write representations ``[n, *shape]``, by the name of their pool, cast to its dtype.

    Args:
        slots: ``[n]`` request slots, -1 where nothing is to be written.
        units: ``[n]`` logical units.
    """
    writes = slots >= 0
    # Without a shape that depends on data: the others write host unit 0, which belongs to
    # nobody, and what it holds.
    at = torch.where(writes, host_ids(layer, slots.clamp(min=0), units), 0)
    for name, rows in new.items():
        pool = layer.pools[name]
        chosen = writes.view(-1, *[1] * (rows.dim() - 1))
        pool[at] = torch.where(chosen, rows.to(pool.dtype), pool[at])


def ends_of(params: object, select: int) -> tuple[int, int]:
    """Count the first and the last units that every selection of ``select`` units holds.

    The parameters ``sink_units`` and ``recent_units`` say it; one that the algorithm lacks is 0.
    None stands for a twelfth and a sixth of the selection, at most 4 and 8 units, and for no more
    than the other leaves. A selection of one unit more forces at most one more, so that budgets
    stay nested. Numbers that were given are not checked: ``RankedUnits`` refuses wrong ones.

    Returns:
        (sinks, recent units).
    """
    sinks, recent = (getattr(params, name, 0) for name in ("sink_units", "recent_units"))
    if sinks is None:
        sinks = max(0, min(4, (select + 3) // 12, select - (recent or 0)))
    if recent is None:
        recent = max(0, min(8, select // 6, select - sinks))
    return sinks, recent


def key_refusals(model: ModelShape, group: GroupShape, kept: str) -> list[str]:
    """The reason against keys that are stored as another dtype than that of the model.

    Args:
        model, group: as in the setup.
        kept: what is made of keys and how it is, ``"bounds are"`` say.
    """
    if group.dtype is model.dtype:
        return []
    return [
        f"{kept} made of rows of {model.dtype}, and they are stored as {group.dtype}; set "
        "kv_format to 'model'"
    ]


def gather_scores(scores: Tensor, selection: Selection) -> None:
    """Fill in the scores of a selection, from those ``[N, U]`` that ranked all units. Hot."""
    assert selection.scores is not None, "no stage reads scores"
    ids = selection.ids
    torch.gather(scores, 1, ids.clamp(min=0).long(), out=selection.scores)
    selection.scores.masked_fill_(ids < 0, float("-inf"))


class KeepsUnits(ABC):
    """Base of algorithms and stages that keep a representation of each unit.

    A subclass says what is kept (``representations``) and how it is made of keys (``represent``).
    Nothing here waits for the device, and no shape depends on data.

    Attributes:
        model, group: as in the setup.
        keeps_values: ``represent`` gets values too.
    """

    model: ModelShape
    group: GroupShape
    keeps_values = False

    @abstractmethod
    def representations(self) -> Sequence[RepresentationSpec]:
        """The pools, all of grain ``"unit"``."""

    @abstractmethod
    def represent(self, keys: Tensor, valid: Tensor) -> Mapping[str, Tensor]:
        """Representations of n units, ``[n, *shape]`` by the name of the pool; cast to its dtype.

        Args:
            keys: ``[n, unit, Hkv, D]`` post-RoPE keys; where ``keeps_values``, keys and values in
                two arguments.
            valid: bool ``[n, unit]``; the first key of a unit is, the others (NaN, say) may not
                have any influence where they are not.
        """

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        units, keys, valid = chunk_units(self.group, start, k)
        rows = (keys, chunk_units(self.group, start, v)[1]) if self.keeps_values else (keys,)
        self._write(layer, torch.full_like(units, slot), units, valid, *rows)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        rows, rings = (k, v)[: 1 + self.keeps_values], (layer.ring_k, layer.ring_v)
        slots, units, valid = appended_units(layer, k.shape[1])
        # There is no ring where a stage regrains: units are then of one token.
        held = (
            row.flatten(0, 1)[:, None]
            if self.group.unit == 1
            else ring_units(layer, ring, slots, units)
            for row, ring in zip(rows, rings, strict=False)
        )
        self._write(layer, slots, units, valid, *held)

    def _write(
        self, layer: LayerView, slots: Tensor, units: Tensor, valid: Tensor, *rows: Tensor
    ) -> None:
        """Represent logical ``units [n]`` of requests ``slots [n]``; slot -1 changes nothing."""
        new = self.represent(*rows, valid)  # type: ignore[call-arg]  # values, if it keeps them
        names = [spec.name for spec in self.representations()]
        for spec in self.representations():
            what = f" of {spec.name!r}"
            self._require("represent", what, new.get(spec.name), len(units), *spec.shape)
        write_units(layer, slots, units, {name: new[name] for name in names})

    def _require(self, method: str, what: str, got: Tensor | None, *shape: int) -> None:
        """Raises PluginError if a method of a subclass gives another shape than it should."""
        if got is None or tuple(got.shape) != shape:
            given = None if got is None else list(got.shape)
            reason = f"{method} must give {list(shape)}{what}, got {given}"
            raise broken_contract(type(self), "selectors", reason)


class RankedUnits(KeepsUnits):
    """Selects the units of the best scores, by a representation of each unit's keys.

    A subclass also scores units for the queries of a lane (``lane_scores``).
    Selected are the K closed units of the highest scores; of equal ones the lower unit wins. A
    subclass whose methods wait for no device and have no shape that depends on data can be
    captured in a CUDA graph.

    Parameters that the entry may offer, each 0 where it does not: ``sink_units``, first units that
    every selection holds, and ``recent_units``, closed units before the open one, both as
    ``ends_of`` reads them; and ``sticky``, a bonus of units that are on the device
    (``topkv_authoring.sticky``; offer it where the scores of lanes are natural logarithms, as they
    are unless ``combine`` is overridden).

    A class with kernels inherits from the reference and sets ``impl = "triton"``: the top-k is
    then the one that the configuration names. It may override ``construct``, ``update`` and
    ``lane_scores`` with launches, and makes their scratch in its constructor.

    Attributes:
        impl: ``"reference"`` or ``"triton"``; whose top-k selects.
        model, group, params: as in the setup.
        sink_units, recent_units: forced units at either end.
        sticky: bonus of resident units, in the units of ``lane_scores``: natural logarithms.
        max_queries: most queries Q of a row.
        work: scratch of the top-k, for all lanes; None for the reference.
    """

    impl = "reference"

    def __init__(self, setup: AlgorithmSetup) -> None:
        """Raises ConfigError with all reasons: of ``refusals``, and against parameters."""
        self.model, self.group, self.params = setup.model, setup.group, setup.params
        self.max_queries = setup.max_queries
        self.sink_units, self.recent_units = ends_of(self.params, self.group.select)
        self.sticky: float = getattr(self.params, "sticky", 0.0)
        reasons, free = list(self.refusals()), self.group.select
        for name in ("sink_units", "recent_units"):
            units = getattr(self, name)
            if 0 <= units <= free:
                free -= units
                continue
            expected = f"an integer of 0 to {free}, the units of a selection that are free"
            reasons.append(
                f"{name} must be {expected}, got {units!r}; lower it or raise the budget"
            )
        if reasons:
            raise ConfigError(type(self).__name__, reasons)
        group = self.group
        kernels = self.impl == "triton"
        self.work = setup.topk(group.max_lanes, group.max_units, group.select) if kernels else None

    def refusals(self) -> Sequence[str]:
        """Reasons to refuse ``model`` or ``group``; none here."""
        return ()

    def combine(self, scores: Tensor) -> Tensor:
        """Scores of units for each lane, fp32 ``[B, lane_heads, U]``.

        Here the log of the sum of the softmaxes of the lane's query heads: the order of their
        mean. In logarithms, because the softmax of a unit far below the best one is 0 in fp32. The
        only head of a lane needs no softmax, and its units are worth their scores.

        Args:
            scores: fp32 ``[B, lane_heads, Q * H / lane_heads, U]``, -inf where a unit is not
                closed, and everywhere for queries that are padding.
        """
        if scores.shape[2] == 1:
            return scores[:, :, 0]
        empty = scores.isneginf().all(-1, keepdim=True)
        shares = scores.masked_fill(empty, 0.0).log_softmax(-1)
        return shares.masked_fill(empty, float("-inf")).logsumexp(2)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec(tuple(self.representations()), scores=True)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        if q.shape[1] > self.max_queries:
            raise ValueError(
                f"{type(self).__name__}: expected at most {self.max_queries} queries a row, got q "
                f"{list(q.shape)}"
            )
        scores, closed = self.lane_scores(layer, self._heads_of_rows(q))
        sticky.prefer_resident(layer, scores, closed, self.sticky, impl=self.impl)
        topk(scores, closed, out.ids, impl=self.impl, work=self.work)
        if out.scores is not None:
            gather_scores(scores, out)
        return out

    def _heads_of_rows(self, q: Tensor) -> Tensor:
        """Queries ``[B, Q, H, D]`` as ``lane_scores`` gets them."""
        if q.shape[1] == 1:
            return q[:, 0]
        heads: Tensor = q.unflatten(2, (self.group.num_kv_heads, -1)).transpose(1, 2).flatten(1, 3)
        return heads

    def real_heads(self, layer: LayerView, q: Tensor) -> Tensor:
        """True where ``q`` of ``lane_scores`` is a head of a query that is no padding; bool
        ``[B, Q * H]``."""
        nth = torch.arange(q.shape[1], device=q.device) % (q.shape[1] // self.group.num_kv_heads)
        real: Tensor = nth // self.model.group_size < layer.step.appended.clamp(min=1)[:, None]
        return real

    @abstractmethod
    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scores that the top-k ranks, ``sticky`` apart. Hot.

        Args:
            layer: the layer.
            q: ``[B, Q * H, D]`` queries of a row as its heads, those of a kv-head adjacent, and of
                them those of a query.

        Returns:
            fp32 ``[B * lane_heads, U]``, +inf for forced units, anything for units that are not
            closed; and int32 ``[B * lane_heads]``, the closed units, 0 in padded rows.
        """


class ScoredUnits(RankedUnits):
    """``RankedUnits`` with a score for each query head and unit (``score``).

    ``combine`` makes the scores of a lane from the scores of its query heads.
    """

    @abstractmethod
    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Scores of units for each query head, fp32 ``[B, H, U]``; higher is better.

        Args:
            q: ``[B, H, D]`` post-RoPE queries. All queries of a row come as heads: H is Q times
                the model's, those of a kv-head adjacent.
            kept: ``[B, U, *shape]`` by the name of the pool. What it holds of units that are not
                closed is anything, and so may be their scores.
        """

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        step, group = layer.step, self.group
        closed = closed_units(layer)
        unit = torch.arange(group.max_units, device=q.device)
        selectable = unit < closed[:, None]
        # Behind the closed units stands no page: unit 0 is read, and masked below.
        at = host_ids(layer, step.slots.clamp(min=0)[:, None], torch.where(selectable, unit, 0))
        kept = {spec.name: layer.pools[spec.name][at] for spec in self.representations()}
        each = self.score(q, kept)
        size = " (rows, query heads, units)"
        self._require("score", size, each, *q.shape[:2], group.max_units)
        scores = each.masked_fill(~selectable[:, None], float("-inf"))
        if q.shape[1] > self.model.num_heads:
            scores = scores.masked_fill(~self.real_heads(layer, q)[..., None], float("-inf"))
        lanes = self.combine(scores.unflatten(1, (group.lane_heads, -1)))
        size = " (rows, lanes, units)"
        self._require("combine", size, lanes, len(q), group.lane_heads, group.max_units)
        forced = (unit < self.sink_units) | (unit >= closed[:, None] - self.recent_units)
        lanes = lanes.masked_fill(forced[:, None], float("inf"))
        return lanes.flatten(0, 1), closed.repeat_interleave(group.lane_heads)
