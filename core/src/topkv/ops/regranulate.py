"""Regranulation: a selection of tokens becomes a selection of the units that hold them.

The step that TensorRT-LLM takes between what an algorithm predicts and what its attention reads
(its sparse attention guide, "AttentionOp behavior"): indices that are unordered, or finer than a
page, become ordered, page-aligned ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import GroupShape


def scratch(lanes: int, units: int, device: torch.device) -> Tensor:
    """Make scratch of ``regranulate``, uint8 ``[lanes, units]``. Make it once; calls that share it
    must not overlap.
    """
    return torch.zeros((lanes, units), dtype=torch.uint8, device=device)


def regranulate(
    tokens: Tensor,
    closed: Tensor,
    ids: Tensor,
    extra: Tensor,
    work: Tensor,
    *,
    unit: int,
    impl: str,
) -> None:
    """List the closed units that hold a selected token, each once, in ascending order.

    With ``counted = {t in tokens[n] : 0 <= t < closed * unit}`` the units of lane n are
    ``sorted({t // unit : t in counted})``, and ``extra[n] = unit * units - |counted|``. Tokens of
    the open unit, which is attended anyway, and -1 fall out.

    No host sync, no allocation by the kernel; may be captured in a CUDA graph.

    Args:
        tokens: int32 ``[N, K]`` tokens, unique in a row, in any order, -1 anywhere; columns
            adjacent.
        closed: int32 ``[B]`` closed units of each request, 0 in padded rows; lane n is one of
            the ``N / B`` lanes of request ``n // (N / B)``. Read as at most U.
        ids: int32 ``[N, W]``, every element written: units, -1 behind them; columns adjacent.
            ``W >= min(K, U)``, so that none is lost.
        extra: int64 ``[N]`` tokens of the listed units that were not selected.
        work: from ``scratch``, of at least N lanes, and of U units.
        unit: tokens of a unit.
        impl: ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``impl`` is unknown.
    """
    _check(tokens, closed, ids, extra, work, impl)
    if not len(tokens):
        return
    if impl == "reference":
        _regranulate(tokens, closed, ids, extra, work.shape[1], unit)
        return
    from topkv.ops import regranulate_kernels

    regranulate_kernels.regranulate(tokens, closed, ids, extra, work, unit)


def _check(
    tokens: Tensor, closed: Tensor, ids: Tensor, extra: Tensor, work: Tensor, impl: str
) -> None:
    if impl not in ("reference", "triton"):
        raise ValueError(f"regranulate: impl must be 'reference' or 'triton', got {impl!r}")
    lanes = tokens.shape[0]
    lacking = work.dim() != 2 or work.shape[0] < lanes
    if ids.shape[:1] != (lanes,) or extra.shape != (lanes,) or lacking:
        raise ValueError(
            "regranulate: expected tokens [N, K], ids [N, W], extra [N] and work of N lanes, got "
            f"{list(tokens.shape)}, {list(ids.shape)}, {list(extra.shape)}, {list(work.shape)}"
        )
    if lanes and (not len(closed) or lanes % len(closed)):
        raise ValueError(
            f"regranulate: N must be a multiple of B, got {lanes} lanes of {len(closed)} requests"
        )
    needed = min(tokens.shape[1], work.shape[1])
    if ids.shape[1] < needed:
        raise ValueError(
            f"regranulate: {tokens.shape[1]} tokens may lie in {needed} units, and ids have room "
            f"for {ids.shape[1]}; widen them"
        )
    dtypes = (tokens.dtype, closed.dtype, ids.dtype, extra.dtype, work.dtype)
    expected = (torch.int32, torch.int32, torch.int32, torch.int64, torch.uint8)
    if dtypes != expected:
        raise ValueError(
            "regranulate: tokens, closed, ids, extra and work must be of "
            f"{', '.join(map(str, expected))}, got {', '.join(map(str, dtypes))}"
        )
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (tokens, closed, ids, extra, work)):
        raise ValueError("regranulate: the last dimension of every tensor must have stride 1")


def _regranulate(
    tokens: Tensor, closed: Tensor, ids: Tensor, extra: Tensor, units: int, unit: int
) -> None:
    """The reference, for all lanes at once."""
    end = closed.clamp(max=units).repeat_interleave(len(tokens) // len(closed))[:, None] * unit
    counted = (tokens >= 0) & (tokens < end)
    place = torch.where(counted, tokens // unit, units).long()
    held = torch.zeros((len(tokens), units + 1), dtype=torch.bool, device=tokens.device)
    held = held.scatter_(1, place, True)[:, :units]
    column = torch.arange(units, device=tokens.device)
    ordered = torch.where(held, column, units).sort(1).values[:, : ids.shape[1]]
    ids.fill_(-1)
    ids[:, : ordered.shape[1]] = torch.where(ordered < units, ordered, -1)
    extra.copy_(held.sum(1) * unit - counted.sum(1))


class TokenSelection:
    """Selected tokens of a group whose stored units are larger, and the units that hold them.

    Args:
        group: with the larger units.
        select: K', tokens that the algorithm selects.
        max_batch: most rows of a forward.
        device: where the tensors are.
        impl: ``"reference"`` or ``"triton"``.

    Attributes (narrowed to the N lanes of the forward):
        ids: int32 ``[N, K']`` tokens.
        extra: int64 ``[N]`` tokens that are attended beyond them, in closed units.
        lane_rows: int64 ``[N]`` where each lane is counted: ``slot * lane_heads + head``, and 0 in
            padded rows, which have no extra tokens.
    """

    ids: Tensor
    extra: Tensor
    lane_rows: Tensor

    def __init__(
        self, group: GroupShape, select: int, max_batch: int, device: torch.device, impl: str
    ) -> None:
        self.group, self.impl = group, impl
        lanes = max_batch * group.lane_heads
        self._ids = torch.zeros((lanes, select), dtype=torch.int32, device=device)
        self._extra = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._lane_rows = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._heads = torch.arange(group.lane_heads, device=device)
        self._work = scratch(lanes, group.max_units, device)

    def begin(self, slots: Tensor) -> None:
        """Narrow to the decode rows of a forward.

        Args:
            slots: int32 ``[B]`` request slot of each row, -1 in padded ones.
        """
        heads = self.group.lane_heads
        lanes = len(slots) * heads
        self.ids, self.extra = self._ids[:lanes], self._extra[:lanes]
        self.lane_rows = self._lane_rows[:lanes]
        first = slots.clamp(min=0)[:, None] * heads
        torch.add(first, self._heads, out=self.lane_rows.view(-1, heads))

    def regranulate(self, closed: Tensor, ids: Tensor) -> None:
        """List the units that hold the selected tokens. Hot.

        Args:
            closed: int32 ``[B]`` closed units.
            ids: int32 ``[N, K]`` of the group's K.
        """
        regranulate(
            self.ids, closed, ids, self.extra, self._work, unit=self.group.unit, impl=self.impl
        )

    def count(self, extra: Tensor) -> None:
        """Add the extra tokens of a layer that attends to this selection to its counts. Hot.

        Args:
            extra: int64 ``[max_lanes]``, see ``GroupStore.extra``.
        """
        extra.index_add_(0, self.lane_rows, self.extra)
