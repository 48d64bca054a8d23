"""Selections that are carried from one step to the next, by request.

A step keeps its selections for the next one, which may have its rows in another order. A selection
that is taken also names the newest unit that can be selected: nobody could select it before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import GroupShape


class Carried:
    """Selections of a group's layers for the next step of their requests.

    Args:
        group: group with K selected units, of which K - 1 are selected ahead.
        requests: most rows of a step, and requests.
        device: where the tensors are.
        impl: ``"reference"`` or ``"triton"``.

    Attributes:
        kept: int32 ``[L, M, K - 1]`` units by lane of a request.
    """

    def __init__(self, group: GroupShape, requests: int, device: torch.device, impl: str) -> None:
        lanes, width = requests * group.lane_heads, group.select

        def ids(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.kept = ids(len(group.layers), lanes, width - 1)
        self._coming = ids(len(group.layers), lanes, width - 1)
        self._planned = ids(lanes, width)  # the last column stays empty
        self._heads, self._impl = group.lane_heads, impl

    def coming(self, layer: int, lanes: int) -> Tensor:
        """Return the tensor to write selections for the next step to, int32 ``[N, K - 1]``.

        Args:
            layer: number within the group.
            lanes: N, lanes of the rows.
        """
        return self._coming[layer, :lanes]

    def in_plan(self, layer: int, lanes: int) -> Tensor:
        """Return ``coming`` in the width of a plan, int32 ``[N, K]``, until the next call. Hot."""
        planned = self._planned[:lanes]
        planned[:, :-1] = self._coming[layer, :lanes]
        return planned

    def keep(self, slots: Tensor, layer: int | None = None) -> None:
        """Keep ``coming`` of ``slots [B]``, of one layer or all. Hot."""
        of = slice(None) if layer is None else slice(layer, layer + 1)
        coming = self._coming[of, : len(slots) * self._heads]
        keep(coming, slots, self.kept[of], impl=self._impl)

    def take(self, layer: int, slots: Tensor, limit: Tensor, ids: Tensor) -> None:
        """Take the kept selections of a layer; see the function ``take``. Hot."""
        take(self.kept[layer], slots, limit, ids, impl=self._impl)


def keep(ids: Tensor, slots: Tensor, kept: Tensor, *, impl: str) -> None:
    """Keep the selections of layers for the next step.

    No host sync, no allocation; may be captured in a CUDA graph.

    Args:
        ids: int32 ``[L, N, K]``; lane n is one of the ``N / B`` lanes of row ``n // (N / B)``.
            Columns adjacent, here and below.
        slots: int32 ``[B]`` request of each row, -1 for padded ones, which keep nothing.
        kept: int32 ``[L, M, K]`` written at the lanes of the requests: ``N / B`` for each slot.
        impl: ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``impl`` is unknown.
    """
    heads = _heads(ids, slots, kept, impl, ids.shape[:1] + ids.shape[2:])
    if not ids.numel():
        return
    if impl == "triton":
        from topkv.ops import carried_kernels

        carried_kernels.keep(ids, slots, kept)
    else:
        live = slots >= 0
        by_slot, by_row = (x.unflatten(1, (-1, heads)) for x in (kept, ids))
        by_slot[:, slots[live].long()] = by_row[:, live]


def take(kept: Tensor, slots: Tensor, limit: Tensor, ids: Tensor, *, impl: str) -> None:
    """Take what the step before has kept for each row, and the unit that closed last.

    That unit is ``limit - 1``. Units from ``limit`` on, which a request that was cut has lost, are
    left to ``plan``.

    No host sync, no allocation by the kernel; may be captured in a CUDA graph.

    Args:
        kept: int32 ``[M, K - 1]``, of one layer of ``keep``.
        slots: as of ``keep``.
        limit: int32 ``[B]`` units of a row that can be selected.
        ids: int32 ``[N, K]``, every element written. The last column has the newest unit, or -1
            where there is none or it is kept; all are -1 in padded rows.
        impl: as of ``keep``.

    Raises:
        ValueError: as ``keep``.
    """
    heads = _heads(ids, slots, kept, impl, torch.Size([ids.shape[-1] - 1]))
    if not ids.numel():
        return
    if impl == "triton":
        from topkv.ops import carried_kernels

        carried_kernels.take(kept, slots, limit, ids)
        return
    padded = (slots < 0).repeat_interleave(heads)[:, None]
    found = kept.unflatten(0, (-1, heads))[slots.clamp(min=0).long()].flatten(0, 1)
    newest = (limit - 1).repeat_interleave(heads)[:, None]
    newest = torch.where((found == newest).any(1, keepdim=True), -1, newest)
    ids.copy_(torch.cat([found, newest], 1).masked_fill(padded, -1))


def _heads(ids: Tensor, slots: Tensor, kept: Tensor, impl: str, wanted: torch.Size) -> int:
    """Check arguments, return lanes of a row. ``wanted``: shape of ``kept`` without lanes."""
    if impl not in ("reference", "triton"):
        raise ValueError(f"carried: impl must be 'reference' or 'triton', got {impl!r}")
    (lanes, requests), rows = (x.shape[-2] for x in (ids, kept)), len(slots)
    if lanes and (not rows or lanes % rows or requests % (lanes // rows)):
        raise ValueError(
            f"carried: expected as many lanes for each request, got {lanes} of {rows} rows and "
            f"{requests} that are kept"
        )
    if kept.shape[:-2] + kept.shape[-1:] != wanted:
        raise ValueError(
            f"carried: what is kept of {list(ids.shape)} must be {[*wanted[:-1], 'lanes']} x "
            f"{wanted[-1]}, got {list(kept.shape)}"
        )
    wrong = [x.dtype for x in (ids, slots, kept) if x.dtype is not torch.int32]
    if wrong or ids.stride(-1) != 1 or kept.stride(-1) != 1:
        raise ValueError(
            f"carried: expected int32 and adjacent columns, got {wrong or 'other strides'}"
        )
    return lanes // rows if rows else 1
