"""The block index in plain torch: the formulas that the kernels are held to.

MiniMax, "MiniMax-M3", as Transformers' ``MiniMaxM3VLIndexer`` has it. Shapes: m rows of queries,
n tokens, H index heads, D index head dim, U units.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unit_scores(q: Tensor, keys: Tensor, unit: int) -> Tensor:
    """Scores of units: the best of a unit's tokens, ``max over its t of q[i, h] . keys[i, t]``.

    Args:
        q: ``[m, H, D]``.
        keys: ``[n, D]``, or ``[m, n, D]`` where every row has keys of its own; n is U * unit.

    Returns:
        fp32 ``[m, H, U]``.
    """
    scores = q.float() @ keys.float().transpose(-1, -2)
    return scores.unflatten(-1, (-1, unit)).amax(-1)


def with_local(scores: Tensor, ends: Tensor, local: int) -> Tensor:
    """Scores in which the last units of a row win.

    Args:
        scores: ``[m, H, U]``.
        ends: int ``[m]`` units that are selectable in each row.
        local: how many of them, the last ones, score ``+inf``.
    """
    units = torch.arange(scores.shape[-1], device=scores.device)
    last = (units >= (ends - local)[:, None]) & (units < ends[:, None])
    return torch.where(last[:, None], torch.inf, scores)
