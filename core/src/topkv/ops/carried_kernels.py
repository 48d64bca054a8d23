"""The kernels of ``carried``; their references stand there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def keep(ids: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Launches; arguments were checked."""
    lanes, width = ids.shape
    keep_kernel[(lanes,)](
        *(ids, slots, kept, ids.stride(0), kept.stride(0)),
        LANE_HEADS=lanes // len(slots),
        K=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


def take(kept: Tensor, slots: Tensor, limit: Tensor, ids: Tensor) -> None:
    """Launches; arguments were checked."""
    lanes, width = ids.shape
    take_kernel[(lanes,)](
        *(kept, slots, limit, ids, kept.stride(0), ids.stride(0)),
        LANE_HEADS=lanes // len(slots),
        K=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def keep_kernel(
    p_ids,
    p_slots,
    p_kept,
    s_ids,
    s_kept,
    LANE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (lane)."""
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + lane // LANE_HEADS).to(tl.int64)
    k = tl.arange(0, BLOCK)
    there = (k < K) & (slot >= 0)
    at = (slot * LANE_HEADS + lane % LANE_HEADS) * s_kept + k
    tl.store(p_kept + at, tl.load(p_ids + lane * s_ids + k, there, other=-1), there)


@triton.jit
def take_kernel(
    p_kept,
    p_slots,
    p_limit,
    p_ids,
    s_kept,
    s_ids,
    LANE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (lane)."""
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + lane // LANE_HEADS).to(tl.int64)
    end = tl.load(p_limit + lane // LANE_HEADS)
    end = tl.where(slot < 0, 0, end)
    k = tl.arange(0, BLOCK)
    in_k = k < K
    at = (slot * LANE_HEADS + lane % LANE_HEADS) * s_kept + k
    unit = tl.load(p_kept + at, in_k & (slot >= 0), other=-1)
    newest = tl.max((in_k & (unit == end - 1)).to(tl.int32), 0)
    unit = tl.where((k == K - 1) & (newest == 0) & (end > 0), end - 1, unit)
    tl.store(p_ids + lane * s_ids + k, unit, in_k)
