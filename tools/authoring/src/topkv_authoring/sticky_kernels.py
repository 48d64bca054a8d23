"""The kernel of ``prefer_resident``; its reference stands there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv.types import LayerView

BLOCK = 1024


def prefer_resident(
    layer: LayerView, scores: Tensor, counts: Tensor, bonus: float, each: int
) -> None:
    """Launches; arguments were checked. ``each`` units of the algorithm are in a stored one."""
    group, step, held = layer.group, layer.step, layer.held
    if not len(scores):
        return
    block = min(BLOCK, max(16, triton.next_power_of_2(group.max_units)))
    sticky_kernel[(len(scores), triton.cdiv(group.max_units, block))](
        *(scores, counts, held, step.slots, step.high, float(bonus)),
        *(group.max_units, scores.stride(0), held.stride(0)),
        LANE_HEADS=group.lane_heads,
        TOKENS=group.unit * each,
        EACH=each,
        T=group.ring_slots // each,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def sticky_kernel(
    p_scores,
    p_counts,
    p_held,
    p_slots,
    p_high,
    bonus,
    units,
    s_scores,
    s_held,
    LANE_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    EACH: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the bonus. Program (lane, block of units); stored units have ``TOKENS`` tokens."""
    lane = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    count = tl.minimum(tl.load(p_counts + lane), units)
    if (slot < 0) | (first >= count):
        return
    u = first + tl.arange(0, BLOCK)
    selectable = u < count
    stored = u // EACH
    in_ring = stored > (tl.load(p_high + row) - 1) // TOKENS - T
    p_lane = p_held + (slot * LANE_HEADS + lane % LANE_HEADS) * s_held
    held = tl.load(p_lane + stored, selectable, other=-1)
    p_scores += lane * s_scores + u
    score = tl.load(p_scores, selectable, other=0.0)
    tl.store(p_scores, score + bonus, selectable & (in_ring | (held >= 0)))
