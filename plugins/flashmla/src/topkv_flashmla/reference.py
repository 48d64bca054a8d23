"""Conversions between topkv's contract and FlashMLA's, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def seen(lengths: Tensor, queries: Tensor, most: int) -> Tensor:
    """Tokens that each query sees, int32 ``[N, most]``: all but those of the queries behind it,
    and none where it is padding.

    Args:
        lengths: int32 ``[N]`` tokens.
        queries: int32 ``[N]``, of ``most``.
    """
    nth = torch.arange(most, device=lengths.device)
    tokens = lengths[:, None] - (queries[:, None] - 1 - nth)
    return torch.where(nth < queries[:, None], tokens, 0).clamp(min=0).int()


def shifted(q: Tensor, queries: Tensor) -> Tensor:
    """``[N, Q, H, D]`` with the queries of each lane behind its padding, which is 0."""
    nth = torch.arange(q.shape[1], device=q.device) - q.shape[1] + queries[:, None]
    moved = q[torch.arange(len(q), device=q.device)[:, None], nth.clamp(min=0)]
    return torch.where((nth >= 0)[..., None, None], moved, 0)


def indices(table: Tensor, lengths: Tensor, unit: int, width: int) -> Tensor:
    """Rows of the listed tokens, int32 ``[N, width]``, -1 behind each length.

    Args:
        table: int32 ``[N, W]`` units.
        lengths: int32 ``[N]`` tokens.
    """
    column = torch.arange(width, device=table.device)
    listed = table[:, (column // unit).clamp(max=table.shape[1] - 1)]
    rows = listed * unit + column % unit
    return torch.where(column < lengths[:, None], rows, -1).int()


def finish(out: Tensor, lse: Tensor, lengths: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """``[N, heads, D]`` and ``[N, heads]`` of what the library gave for padded heads."""
    full = (lengths > 0)[:, None]
    out = torch.where(full[..., None], out[:, :heads], 0.0)
    return out, torch.where(full, lse[:, :heads], -torch.inf)


def shown(ids: Tensor, ahead: int, room: int) -> tuple[Tensor, Tensor]:
    """Columns that rows of a prompt have selected and may see, int32 ``[m, room]``, -1 behind
    them, and int32 ``[m]`` how many.

    Args:
        ids: int32 ``[m, W]`` columns, -1 anywhere.
        ahead: last column that row 0 may see; each further row may see one more.
        room: columns of the result, at least W.
    """
    last = ahead + torch.arange(len(ids), device=ids.device)
    keep = (ids >= 0) & (ids <= last[:, None])
    order = (~keep).byte().argsort(dim=1, stable=True)
    counts = keep.sum(1, dtype=torch.int32)
    found = torch.full((len(ids), room), -1, dtype=torch.int32, device=ids.device)
    found[:, : ids.shape[1]] = torch.where(keep, ids, -1).gather(1, order)
    return found, counts
