"""The kernels of ``carried``; their references stand there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def _warps(block: int) -> int:
    return 1 if block <= 512 else 8


def keep(ids: Tensor, slots: Tensor, kept: Tensor) -> None:
    """Launches; arguments were checked."""
    layers, lanes, width = ids.shape
    block = triton.next_power_of_2(max(width, 1))
    keep_kernel[(lanes, layers)](
        *(ids, slots, kept, *ids.stride()[:2], *kept.stride()[:2], width),
        LANE_HEADS=lanes // len(slots),
        BLOCK=block,
        num_warps=_warps(block),
    )


def take(kept: Tensor, slots: Tensor, limit: Tensor, ids: Tensor) -> None:
    """Launches; arguments were checked."""
    lanes, width = ids.shape
    block = triton.next_power_of_2(width)
    take_kernel[(lanes,)](
        *(kept, slots, limit, ids, kept.stride(0), ids.stride(0), width),
        LANE_HEADS=lanes // len(slots),
        BLOCK=block,
        num_warps=_warps(block),
    )


@triton.jit
def keep_kernel(
    p_ids,
    p_slots,
    p_kept,
    s_ids_layer,
    s_ids,
    s_kept_layer,
    s_kept,
    width,
    LANE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep selections. Program (lane, layer)."""
    lane, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + lane // LANE_HEADS).to(tl.int64)
    k = tl.arange(0, BLOCK)
    there = (k < width) & (slot >= 0)
    unit = tl.load(p_ids + layer * s_ids_layer + lane * s_ids + k, there, other=-1)
    to = layer * s_kept_layer + (slot * LANE_HEADS + lane % LANE_HEADS) * s_kept
    tl.store(p_kept + to + k, unit, there)


@triton.jit
def take_kernel(
    p_kept,
    p_slots,
    p_limit,
    p_ids,
    s_kept,
    s_ids,
    width,
    LANE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take selections. Program (lane)."""
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + lane // LANE_HEADS).to(tl.int64)
    newest = tl.load(p_limit + lane // LANE_HEADS) - 1
    k = tl.arange(0, BLOCK)
    at = (slot * LANE_HEADS + lane % LANE_HEADS) * s_kept + k
    unit = tl.load(p_kept + at, (k < width - 1) & (slot >= 0), other=-1)
    kept = tl.max((unit == newest).to(tl.int32), 0)  # so is -1, where there is no unit
    unit = tl.where((k == width - 1) & (kept == 0) & (slot >= 0), newest, unit)
    tl.store(p_ids + lane * s_ids + k, unit, k < width)
