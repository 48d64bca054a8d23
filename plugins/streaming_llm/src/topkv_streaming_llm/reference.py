"""StreamingLLM in plain torch: the formula that the kernel is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_units(closed: Tensor, select: int, sinks: int) -> Tensor:
    """The first ``sinks`` and the newest ``select - sinks`` of the closed units.

    Args:
        closed: ``[n]`` closed units of each request.
        select: K.
        sinks: units that are never dropped, at most K.

    Returns:
        ``[n, K]`` ascending, -1 behind the last one; all closed units where they fit.
    """
    column = torch.arange(select, device=closed.device)
    dropped = (closed - select).clamp(min=0)[:, None]
    units = torch.where(column < sinks, column, column + dropped)
    return torch.where(units < closed[:, None], units, -1)
