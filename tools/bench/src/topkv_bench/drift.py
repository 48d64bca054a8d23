"""A selection of stated drift, or a recorded one, written over what each layer has selected.

Weights that were never trained select nearly at random from step to step, and a real model does
not. So a run states how much of a selection changes in a step. The algorithm still runs, and its
cost stays in; only the ids that it leaves are written over, by one further launch a layer.

The U units that are selectable at the end of the prompt are dealt to the K columns of a selection
in K neighbouring runs. Each column walks its own run, from a place of its own, and goes on by one
unit in the steps that its phase says, so that every step moves a share ``drift`` of the columns.
A step that verifies N tokens moves N such shares: each of its queries asks for as many new units
as a step of one, no unit is new to two of them, and what rejected tokens have asked for is not
asked for again. So at a share a token this is the most that a joint selection misses.
Nothing is drawn and nothing is kept: the unit of a column follows from lane, layer and length,
which are on the device, and a captured graph replays it. Units of a lane are distinct because
their runs are, and a unit comes back only when its whole run was walked, so that a buffer gains
nothing by units that return.

Instead of a drift a trace of a real model may be named; see ``recorded``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv import SparseCoordinator
from topkv.config import LoweredGroup
from topkv.decode.layers import LayerPath
from topkv.decode.selectors import Own
from topkv.errors import ConfigError
from topkv.types import Selection
from topkv_bench import recorded

SCALE = 2**16
"""A drift of 1 as a whole number, so that steps are counted exactly at any length."""


def rate_of(drift: float) -> int:
    """Return a drift between 0 and 1 in parts of ``SCALE``."""
    return round(drift * SCALE)


def effective(drift: float, select: int, units: int, tokens: int = 1) -> float:
    """Return the share of a full selection that a step of ``tokens`` tokens replaces.

    Less than ``tokens * drift`` where fewer than two units fall to some columns: those cannot
    move. 0 where all units fit a selection.
    """
    movable = min(1.0, max(0, units - select) / select)
    return tokens * rate_of(drift) / SCALE * movable


def mixed(number: Tensor) -> Tensor:
    """Mix the lower 32 bits of an int64 to 32 bits, by shifts and two products."""
    number = number & 0xFFFFFFFF
    number = number ^ (number >> 16)
    number = (number * 0x21F0AAAD) & 0xFFFFFFFF
    number = number ^ (number >> 15)
    number = (number * 0x735A2D97) & 0xFFFFFFFF
    return number ^ (number >> 15)


def write(
    ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    limit: Tensor,
    layer: int,
    units: int,
    rate: int,
) -> None:
    """Write a drifting selection over one that was made; the reference of ``drift_kernels``.

    Columns of -1 stay as they are, and so does every lane of a request that cannot select
    ``units`` units yet. With ``units < K`` nothing is written: everything is selected anyway.

    Args:
        ids: int32 ``[N, K]`` selected units, -1 anywhere; written in place.
        slots: int32 ``[B]`` request slots, -1 in padded rows, whose ids are all -1.
        lengths: int32 ``[B]`` tokens of each request, or how far its columns have walked.
        limit: int32 ``[B]`` selectable units of each request.
        layer: number of the layer; layers walk differently.
        units: U, units that are selected from: ``0 .. U - 1``.
        rate: drift in parts of ``SCALE``.
    """
    select, heads = ids.shape[1], len(ids) // max(1, len(slots))
    if units < select or not len(ids):
        return
    head = torch.arange(heads, device=ids.device)
    lane = (slots.long()[:, None] * heads + head).flatten()[:, None]
    rank = torch.arange(select, device=ids.device)
    seed = mixed(lane * 8191 + layer)
    phase = (rank * 40503 + seed) & 0xFFFF  # 40503 / SCALE is the golden ratio: phases are even
    first = rank * units // select
    size = (rank + 1) * units // select - first
    epoch = (lengths.long().repeat_interleave(heads)[:, None] * rate + phase) >> 16
    walked = mixed(seed + rank * 40503) + epoch
    room = (limit >= units).repeat_interleave(heads)[:, None]
    ids.copy_(torch.where((ids >= 0) & room, first + walked % size, ids))


class DriftingSelector:
    """A selector whose selection is written over; all else is the inner selector's.

    Args:
        path: path of the layer.
        selector: its selector, which selects for itself.
        over: writes over ids; takes slots, lengths and limits too.
        walked: see ``drifting``.
    """

    def __init__(
        self, path: LayerPath, selector: Own, over: Callable[..., None], walked: Tensor | None
    ) -> None:
        self.selector, self.lanes, self._write = selector, path.lanes, over
        self._walked = walked

    def __getattr__(self, name: str) -> Any:
        return getattr(self.selector, name)

    def select(self, *arguments: Any) -> Selection:
        """Let the algorithm select, and write over its ids. Hot."""
        return self._over(self.selector.select(*arguments))

    def warm(self) -> Selection:
        """Select by the last query of each prompt, so that decoding begins with hits."""
        return self._over(self.selector.warm())

    def _over(self, selection: Selection) -> Selection:
        lanes, step = self.lanes, self.lanes.step
        lengths = step.lengths if self._walked is None else self._walked[: len(step.slots)]
        self._write(selection.ids, step.slots, lengths, lanes.limit)
        return selection


@frozen
class Drift:
    """A drift as it takes effect in a model's layers.

    Attributes:
        stated: as it was asked for: a share, or the path of a trace.
        effective: of a step, the least over groups, see ``effective``; ``replaced`` of a trace.
        layers: number of layers whose selection is written over.
    """

    stated: float | str
    effective: float
    layers: int


@contextmanager
def drifting(
    coordinator: SparseCoordinator,
    drift: float | str,
    context: int,
    tokens: int = 1,
    walked: Tensor | None = None,
) -> Iterator[Drift]:
    """Have every layer that selects for itself leave a drifting selection, until the end.

    Layers that share the selection of the one before them share this one. The forced tail is no
    part of a selection and is attended as before. Selections are then of full width; where an
    algorithm leaves -1, -1 stays, but a recorded selection replaces these too.

    Args:
        coordinator: between forwards. Graphs captured inside are no longer valid afterwards.
        drift: between 0 and 1, or the path of a trace.
        context: tokens of every prompt; shorter requests keep what was selected.
        tokens: that a step verifies.
        walked: int32 ``[max_requests]`` tokens that were verified, those of the prompt among them,
            where lengths do not count them; with a trace its steps. The caller counts. None to
            take lengths.

    Raises:
        ConfigError: the trace does not serve.
    """
    layers = [path for path in coordinator.layers if isinstance(path.selector, Own)]
    shares, overs = [], []
    for number, path in enumerate(layers):
        group = coordinator.config.groups[path.lanes.index]
        units, select = selectable(group, context), group.shape.select
        if isinstance(drift, str):
            depth = number / len(layers)
            share, over = _recorded(drift, tokens, coordinator, path, depth, select, units)
        else:
            share = effective(drift, select, units, tokens)
            over = partial(
                _writer(coordinator, "drift"),
                layer=path.view.layer,
                units=units,
                rate=rate_of(drift),
            )
        shares.append(share)
        overs.append(over)
    replaced = [(path, path.selector) for path in layers]
    for (path, selector), over in zip(replaced, overs, strict=True):
        drifts = DriftingSelector(path, selector, over, walked)  # type: ignore[arg-type]
        path.selector = drifts  # type: ignore[assignment]
    try:
        yield Drift(drift, min(shares, default=0.0), len(replaced))
    finally:
        for path, selector in replaced:
            path.selector = selector


def _writer(coordinator: SparseCoordinator, name: str) -> Callable[..., None]:
    """Choose ``drift.write`` or ``recorded.write``, as kernels if the coordinator has kernels."""
    if coordinator.config.impl == "triton":
        from topkv_bench import drift_kernels, recorded_kernels

        return drift_kernels.write if name == "drift" else recorded_kernels.write
    return write if name == "drift" else recorded.write


def _recorded(
    trace: str,
    tokens: int,
    coordinator: SparseCoordinator,
    path: LayerPath,
    depth: float,
    select: int,
    units: int,
) -> tuple[float, Callable[..., None]]:
    """Return the share that a trace replaces in a step, and a function that writes the selections
    of its layer at ``depth``, between 0 and 1."""
    found, group = recorded.load(trace), coordinator.config.groups[path.lanes.index]
    if found.tokens != tokens:
        reason = f"its steps have {found.tokens} tokens, and here they verify {tokens}"
        advice = f"record it with topkv record --queries {tokens}"
        raise ConfigError("the trace does not serve", [f"{reason}; {advice}"])
    lanes = group.shape.lane_heads
    copies, stretch = found.copies(select, units)
    of_layer = found.ids[:, int(depth * found.ids.shape[1])]
    head = torch.arange(lanes) * of_layer.shape[1] // lanes
    table = of_layer[:, head].contiguous().to(path.view.ring_k.device)
    over = partial(
        _writer(coordinator, "recorded"),
        table=table,
        units=units,
        copies=copies,
        stretch=stretch,
    )
    return found.replaced, over


def selectable(group: LoweredGroup, tokens: int) -> int:
    """Return how many units of a request of ``tokens`` tokens a selection can name."""
    return tokens if group.tail == "selectable" else (tokens - 1) // group.shape.unit
