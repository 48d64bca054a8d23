"""Selections of a trace by ``topkv record``, written over the selections of an algorithm.

A trace says which of U units every layer and lane of a model selected, K of them in each of T
steps. It serves a geometry of other layers, lanes and contexts: a layer takes the selections of
the layer of the trace at the same depth, a lane those of the lane at the same share of the way,
and where the context has s times the units, unit u stands for units ``s u .. s u + c - 1``, with c
as often as K goes into the columns of a selection. So the share of a selection that a step
replaces is that of the trace, layer by layer. Steps go to the end of the trace and back again,
from another one in each request, since no text begins anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from topkv.errors import ConfigError


@frozen(eq=False)
class Recorded:
    """Selections of one request.

    Attributes:
        ids: int32 ``[T, L, H, K]`` units, -1 where fewer were selected; T at least 2.
        units: U, more than any of them.
        replaced: share of a selection that was not in the one a step before, mean of all.
        tokens: of a step, which share a selection.
    """

    ids: Tensor
    units: int
    replaced: float
    tokens: int = 1

    @classmethod
    def of(cls, ids: Tensor, units: int, tokens: int = 1) -> Recorded:
        """Count replaced units; arguments as the attributes."""
        new = 0
        for layer in ids.unbind(1):
            held = torch.zeros(*layer.shape[:2], units + 1, dtype=torch.bool)
            held.scatter_(-1, layer.long() % (units + 1), True)  # -1 is the last place
            new += int((held[1:] & ~held[:-1])[..., :-1].sum())
        return cls(ids, units, new / max(1, int((ids[1:] >= 0).sum())), tokens)

    def copies(self, select: int, units: int) -> tuple[int, int]:
        """Return the number of the trace's selections that fill ``select`` columns, and the number
        of ``units`` that one unit of the trace stands for.

        Raises:
            ConfigError: the trace selects more than the columns, or a larger share of its units.
        """
        width = self.ids.shape[-1]
        copies, stretch = select // width, units // self.units
        reasons = []
        if copies < 1:
            reasons.append(f"it selects {width} units, and a selection here has {select}")
        if stretch < copies:
            reasons.append(
                f"it selects {width} of {self.units} units, and here {select} of {units} are: "
                "record with as large a share of the context as the budget has"
            )
        if reasons:
            raise ConfigError("the trace does not serve", reasons)
        return copies, stretch


@cache
def load(path: str) -> Recorded:
    """Load the selections of a trace of one request and one group of layers.

    Raises:
        ConfigError: topkv-simulate is not installed, or the trace is of another kind.
    """
    try:
        from topkv_simulate.trace import ROW, Trace
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "topkv_simulate":
            raise
        reason = "it is read by topkv-simulate, which is not installed: pip install topkv-simulate"
        raise ConfigError(f"the trace {path} cannot be read", [reason]) from error
    trace = Trace.load(Path(path))
    steps = trace.rows[:, ROW.warm] == 0
    slots = {*trace.rows[steps, ROW.slot].tolist()}
    if len(trace.groups) != 1 or len(slots) != 1 or steps.sum() < 2:
        got = f"{len(trace.groups)} groups, {len(slots)} requests, {steps.sum()} steps"
        expected = "expected one group of layers, one request and at least two steps, got"
        raise ConfigError(f"the trace {path} does not serve", [f"{expected} {got}"])
    (group,) = trace.groups
    ids = torch.from_numpy(group.ids[steps]).to(torch.int32)
    tokens = int(trace.rows[steps, ROW.appended].max())
    return Recorded.of(ids, int(group.limits[steps].max()), tokens)


def step_of(lengths: Tensor, slots: Tensor, steps: int) -> Tensor:
    """Steps of a trace by row, int64: to its end and back, from another one in each request."""
    turn = 2 * (steps - 1)
    place = (lengths.long() + slots.long() * (turn * 40503 >> 16)) % turn
    return torch.minimum(place, turn - place)


def write(
    ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    limit: Tensor,
    table: Tensor,
    units: int,
    copies: int,
    stretch: int,
) -> None:
    """Write a recorded selection over one that was made; the reference of ``recorded_kernels``.

    Padded rows, and requests that cannot select ``units`` units yet, stay as they are. Columns
    that the trace does not reach become -1.

    Args:
        ids: int32 ``[N, K']`` selected units; written in place.
        slots: int32 ``[B]`` request slots, -1 in padded rows.
        lengths: int32 ``[B]`` tokens of each request, or other counts that grow by 1 in a step.
        limit: int32 ``[B]`` selectable units of each request.
        table: int32 ``[T, H', K]`` of the layer, H' = N / B lanes.
        units: units that are selected from.
        copies, stretch: see ``Recorded.copies``.
    """
    rows, heads = len(slots), table.shape[1]
    if not rows:
        return
    step = step_of(lengths, slots.clamp(min=0), len(table))
    chosen = table[step]
    column = torch.arange(ids.shape[1], device=ids.device)
    copy, place = column // table.shape[2], column % table.shape[2]
    new = chosen[..., place]
    new = torch.where((new >= 0) & (copy < copies), new * stretch + copy, -1)
    room = (slots >= 0) & (limit >= units)
    held = ids.view(rows, heads, -1)
    held.copy_(torch.where(room[:, None, None], new.to(ids.dtype), held))
