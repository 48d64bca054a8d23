"""Attention mass that selections hold, and bytes that are read to find them.

Both are taken from one decode step of the running model: the queries and ids that every sparse
layer attends with, and the names of the representation pools that the plugins look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from topkv.assembly.stages import Staged
from topkv.coordinator import SparseCoordinator
from topkv.decode.lanes import LaneBuffers
from topkv.decode.layers import LayerPath
from topkv.decode.selectors import Own
from topkv.hooks.algorithm import RepresentationSpec
from topkv.plugins.contract import has_hook
from topkv.prompts.history import StoredHistory
from topkv.types import GroupShape, LayerView, Selection, Tables


class _NamesRead(dict[str, Tensor]):
    """Pools of a layer, with the names of pools that were asked for."""

    def __init__(self, pools: Any) -> None:
        super().__init__(pools)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


class _Watched:
    """Wrapper of an algorithm or a stage that notes its reads; all else goes to the original.

    Attributes:
        watched: the algorithm or stage.
        armed: True if the next steps are noted.
        names: names of the pools that such steps have read.
        corrects: True if such a step has corrected for the units that were left out.
    """

    def __init__(self, watched: Any) -> None:
        self.watched = watched
        self.armed = self.corrects = False
        self.names: set[str] = set()
        if has_hook(watched, "correct"):  # the others have none
            self.correct = self._correct

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)

    def _correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        self.corrects = self.corrects or self.armed
        with self._noting(layer) if self.armed else nullcontext():
            self.watched.correct(layer, q, selection, out, lse)

    @contextmanager
    def _noting(self, layer: LayerView) -> Iterator[None]:
        """Note which pools of the layer are read meanwhile."""
        pools = layer.pools
        layer.pools = watching = _NamesRead(pools)
        try:
            yield
        finally:
            layer.pools = pools
        self.names |= watching.names


class WatchedAlgorithm(_Watched):
    """An algorithm whose reads are noted."""

    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        """Select, noting reads; see ``topkv.hooks.algorithm.Algorithm``."""
        with self._noting(layer) if self.armed else nullcontext():
            selection: Selection = self.watched.retrieve_topk(layer, q, weights, out)
        return selection

    def arm(self, armed: bool) -> None:
        """Note the next steps, or no longer."""
        self.armed = armed

    def read(self, view: LayerView, length: int) -> float:
        """Return representation bytes that a noted step read for a request of this length."""
        return index_bytes(view, self.watched.spec().representations, self.names, length)


class WatchedStage(_Watched):
    """A stage whose reads are noted, and the number of units that it reads of.

    Attributes:
        units: candidates of a lane, the mean of the noted step.
    """

    units = 0.0

    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        """Refine, noting reads; see ``topkv.hooks.stage.Stage``."""
        if self.armed:
            self.units = float((candidates.ids >= 0).sum(1).float().mean())
        with self._noting(layer) if self.armed else nullcontext():
            selection: Selection = self.watched.refine(layer, q, candidates, out)
        return selection


class WatchedStages:
    """An algorithm with stages behind it, each of which is watched by itself.

    The algorithm reads representations of the request, a stage those of its candidates. A stage
    that corrects reads those of all units that are not attended, which is counted as all units.

    Args:
        staged: the algorithm of the group.
    """

    def __init__(self, staged: Staged) -> None:
        self.first = WatchedAlgorithm(staged.algorithm)
        self.links = [evolve(link, stage=WatchedStage(link.stage)) for link in staged.links]
        self.staged = Staged(self.first, staged.group, self.links)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.staged, name)

    def arm(self, armed: bool) -> None:
        """Note the next steps, or no longer."""
        for part in (self.first, *(link.stage for link in self.links)):
            part.armed = armed

    def read(self, view: LayerView, length: int) -> float:
        """Return the bytes that were read, as ``WatchedAlgorithm.read``."""
        total = self.first.read(view, length)
        for link in self.links:
            offered = min(round(link.stage.units * link.group.unit), length)
            tokens = length if link.stage.corrects else offered
            names = {link.prefix + name for name in link.stage.names}
            total += index_bytes(view, link.representations(), names, tokens)
        return total


@dataclass
class Seen:
    """One step of one layer.

    Attributes:
        q: ``[B, H, D]`` queries of the attention, whatever the algorithm was asked with.
        ids: int32 ``[N, K]`` logical ids, of the layer before where its selection is shared.
    """

    q: Tensor
    ids: Tensor


class WatchedBackend:
    """A backend whose queries are noted; all else goes to the backend itself."""

    def __init__(self, backend: Any, lanes: LaneBuffers) -> None:
        self.backend, self.lanes = backend, lanes
        self.armed = False
        self.seen: Seen | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """Attend, noting queries and ids; see ``topkv.hooks.backend.Backend``."""
        self.backend.attend(q, k, v, tables, out, lse)
        if self.armed:
            self.seen = Seen(q[:, 0].clone(), self.lanes.selection.ids.clone())


def watch(coordinator: SparseCoordinator) -> list[LayerPath]:
    """Watch every sparse layer, and return their paths, by layer."""
    paths = [path for path in coordinator.layers if path.algorithm]
    for path in paths:
        watching = WatchedStages if isinstance(path.algorithm, Staged) else WatchedAlgorithm
        path.algorithm = watching(path.algorithm)
        if isinstance(path.selector, Own):  # the others call no algorithm
            path.selector.algorithm = path.algorithm
        path.backend = WatchedBackend(path.backend, path.lanes)
    return paths


def arm(paths: Sequence[LayerPath], armed: bool) -> None:
    """Watch the next steps of these layers, or no longer."""
    for path in paths:
        path.algorithm.arm(armed)
        path.backend.armed = armed


def chosen_tokens(ids: Tensor, unit: int, tail: bool, tokens: int) -> Tensor:
    """Return which tokens lanes attend to.

    Args:
        ids: ``[lanes, K]`` logical ids; ids out of range count for nothing.
        unit: tokens of a unit.
        tail: True if the newest unit is attended besides.
        tokens: n, tokens of the request.

    Returns:
        bool ``[lanes, n]``.
    """
    units = -(-tokens // unit)
    inside = torch.where((ids >= 0) & (ids < units), ids, units).long()
    chosen = torch.zeros((len(ids), units + 1), dtype=torch.bool, device=ids.device)
    chosen.scatter_(1, inside, True)
    if tail:
        chosen[:, units - 1] = True
    return chosen[:, :units].repeat_interleave(unit, 1)[:, :tokens]


def lane_mass(q: Tensor, k: Tensor, lanes: int, scale: float) -> Tensor:
    """Return the softmax mass of each token, fp32 ``[lanes, n]``: the mean of a lane's heads.

    Args:
        q: ``[H, D]``.
        k: ``[n, Hkv, D]`` all keys that the query may attend.
        lanes: number of lanes among which the heads are divided.
        scale: factor of the logits.
    """
    keys = k.float().permute(1, 2, 0)  # [Hkv, D, n]
    logits = q.float().view(len(keys), -1, q.shape[-1]) @ keys * scale
    return logits.softmax(-1).view(lanes, -1, len(k)).mean(1)


def held_mass(mass: Tensor, chosen: Tensor, budget: int) -> tuple[float, float]:
    """Return the softmax mass of the selected tokens, and of the best ``budget`` ones.

    Both are means of all heads. The best are chosen per lane, by the mean over its query heads:
    no selection of as many tokens a lane holds more.

    Args:
        mass: result of ``lane_mass``.
        chosen: result of ``chosen_tokens``.
        budget: tokens of the budget.
    """
    best = mass.topk(min(budget, mass.shape[1]), -1).values
    return float((mass * chosen).sum(-1).mean()), float(best.sum(-1).mean())


@dataclass(frozen=True)
class Look:
    """Figures of the sparse layers for one row of a step.

    Attributes:
        held, best: results of ``held_mass``, means over the layers.
        attended_bytes: bytes of keys and values that were attended to, of all sparse layers.
    """

    held: float
    best: float
    attended_bytes: float


def recall_of(
    coordinator: SparseCoordinator,
    paths: Sequence[LayerPath],
    slots: Sequence[int],
    rows: Sequence[int],
    budget: int,
) -> list[Look]:
    """Look at rows of a step that was watched.

    Args:
        coordinator: between two forwards.
        paths: result of ``watch``.
        slots: request slot of each row of the step.
        rows: the rows to look at.
        budget: tokens of the budget.
    """
    looks = []
    for row in rows:
        coordinator.flush(slots[row])
        each = [_look_at(path, coordinator, slots[row], row, budget) for path in paths]
        held, best, read = (sum(values) for values in zip(*each, strict=True))
        looks.append(Look(held / len(each), best / len(each), read))
    return looks


def mass_of(path: LayerPath, coordinator: SparseCoordinator, slot: int, row: int) -> Tensor:
    """Return ``lane_mass`` of a row of a step that was watched."""
    seen, model = path.backend.seen, coordinator.model
    length = coordinator.length(slot)
    # One block: the whole history, decoded where the rows are packed.
    ((_, k, _),) = StoredHistory(path, slot, 0, length, length, model.dtype, seen.q.device)
    return lane_mass(seen.q[row], k, path.view.group.lane_heads, model.scale)


def chosen_of(path: LayerPath, coordinator: SparseCoordinator, slot: int, row: int) -> Tensor:
    """Return ``chosen_tokens`` of a row of a step that was watched."""
    group = path.view.group
    lanes = slice(row * group.lane_heads, (row + 1) * group.lane_heads)
    tail = coordinator.config.groups[path.lanes.index].tail == "forced"
    length = coordinator.length(slot)
    return chosen_tokens(path.backend.seen.ids[lanes], group.unit, tail, length)


def _look_at(
    path: LayerPath, coordinator: SparseCoordinator, slot: int, row: int, budget: int
) -> tuple[float, float, float]:
    group, chosen = path.view.group, chosen_of(path, coordinator, slot, row)
    held, best = held_mass(mass_of(path, coordinator, slot, row), chosen, budget)
    return held, best, float(chosen.sum()) * group.entry_bytes / group.unit


def index_bytes(
    view: LayerView, pools: Iterable[RepresentationSpec], names: set[str], length: int
) -> float:
    """Count the bytes of ``pools`` with ``names`` for ``length`` tokens, in one layer.

    Counted from the tensors. Of grain unit and token: the places of the request's tokens; of
    grain request: all that is allotted for it, the most that a step can read.
    """
    total = 0.0
    for item in pools:
        if item.name not in names:
            continue
        place = view.pools[item.name][0]
        count = {"unit": -(-length // view.group.unit), "token": length, "request": 1}[item.grain]
        total += count * place.numel() * place.element_size()
    return total


def index_read(paths: Sequence[LayerPath], length: int) -> tuple[float, float]:
    """Return representation bytes that the watched step read for a request, in all layers, and
    what they are in stored tokens, mean of the layers; 0 without any."""
    read = [path.algorithm.read(path.selector.view, length) for path in paths]
    rows = [row_bytes(path.view.group) for path in paths]
    tokens = sum(each / row for each, row in zip(read, rows, strict=True))
    return sum(read), tokens / max(1, len(paths))


def row_bytes(group: GroupShape) -> float:
    """Return the bytes of a token's keys and values in a layer, on the device."""
    return group.lane_heads * group.entry_bytes / group.unit


def dense_read(coordinator: SparseCoordinator, length: int, residencies: Sequence[str]) -> float:
    """Return the bytes of a request's keys and values in layers of these residencies: what they
    read in a step if they are dense."""
    shapes = [group.shape for group in coordinator.config.groups]
    return sum(
        len(shape.layers) * row_bytes(shape) * length
        for shape in shapes
        if shape.residency in residencies
    )
