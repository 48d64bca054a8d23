"""Selections that are carried from one step to the next, by request.

A step keeps what it has selected for the next one, which may have its rows in another order. What
is taken then names the newest unit that can be selected, too: nobody could select it before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep(ids: Tensor, slots: Tensor, kept: Tensor, *, impl: str) -> None:
    """Keep the selection of each row for the next step.

    No host sync, no allocation; may be captured in a CUDA graph.

    Args:
        ids: int32 ``[N, K]``; lane n is one of the ``N / B`` lanes of row ``n // (N / B)``.
            Columns adjacent, here and below.
        slots: int32 ``[B]`` request of each row, -1 for padded ones, which keep nothing.
        kept: int32 ``[M, K]`` written at the lanes of the requests: ``N / B`` for each slot.
        impl: ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``impl`` is unknown.
    """
    if not _lanes(ids, slots, kept, impl):
        return
    if impl == "reference":
        live = slots >= 0
        by_slot, by_row = (
            kept.unflatten(0, (-1, len(ids) // len(slots))),
            ids.unflatten(0, (len(slots), -1)),
        )
        by_slot[slots[live].long()] = by_row[live]
        return
    from topkv.ops import carried_kernels

    carried_kernels.keep(ids, slots, kept)


def take(kept: Tensor, slots: Tensor, limit: Tensor, ids: Tensor, *, impl: str) -> None:
    """Take what the step before has kept for each row.

    If ``limit - 1``, the unit that closed last, is not in it, that takes the place of the last
    column. Units from ``limit`` on, which a request that was cut has lost, are left to ``plan``.

    No host sync, no allocation by the kernel; may be captured in a CUDA graph.

    Args:
        kept, slots: as of ``keep``.
        limit: int32 ``[B]`` units of a row that can be selected.
        ids: int32 ``[N, K]``, every element written; -1 in padded rows.
        impl: as of ``keep``.

    Raises:
        ValueError: as ``keep``.
    """
    if not _lanes(ids, slots, kept, impl):
        return
    if impl == "reference":
        lanes = len(ids) // len(slots)
        found = kept.unflatten(0, (-1, lanes))[slots.clamp(min=0).long()].flatten(0, 1)
        ends = torch.where(slots < 0, 0, limit).repeat_interleave(lanes)[:, None]
        found[(slots < 0).repeat_interleave(lanes)] = -1
        lacks = (ends > 0) & ~(found == ends - 1).any(1, keepdim=True)
        found[:, -1:] = torch.where(lacks, ends - 1, found[:, -1:])
        ids.copy_(found)
        return
    from topkv.ops import carried_kernels

    carried_kernels.take(kept, slots, limit, ids)


def _lanes(ids: Tensor, slots: Tensor, kept: Tensor, impl: str) -> int:
    """How many there are, checked."""
    if impl not in ("reference", "triton"):
        raise ValueError(f"carried: impl must be 'reference' or 'triton', got {impl!r}")
    lanes, rows = len(ids), len(slots)
    if lanes and (not rows or lanes % rows or len(kept) % (lanes // rows)):
        raise ValueError(
            f"carried: expected as many lanes for each request, got {lanes} of {rows} rows and "
            f"{len(kept)} that are kept"
        )
    if ids.shape[1:] != kept.shape[1:]:
        raise ValueError(
            f"carried: expected equal widths, got {list(ids.shape)} and {list(kept.shape)}"
        )
    wrong = [x.dtype for x in (ids, slots, kept) if x.dtype is not torch.int32]
    if wrong or ids.stride(-1) != 1 or kept.stride(-1) != 1:
        raise ValueError(
            f"carried: expected int32 and adjacent columns, got {wrong or 'other strides'}"
        )
    return lanes
