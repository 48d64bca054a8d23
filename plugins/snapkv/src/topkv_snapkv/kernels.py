"""The hot path of SnapKV in Triton, beside ``reference.select``: a copy of ids."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv.types import LayerView

BLOCK = 1024
"""Most ids of one program."""


@triton.jit
def select_kernel(
    p_kept,
    p_count,
    p_turn,
    p_slots,
    p_lengths,
    p_ids,
    s_ids,
    select,
    cap,
    room,
    LANE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (lane, block of columns): kept positions, then generated ones, -1 behind them."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(p_slots + lane // LANE_HEADS).to(tl.int64)
    length = tl.load(p_lengths + lane // LANE_HEADS)
    alive = slot >= 0
    row = slot * LANE_HEADS + lane % LANE_HEADS
    count = tl.load(p_count + row, alive, other=0)
    prompt = tl.load(p_turn + slot * TURN, alive, other=0)
    last = tl.where(alive, length - 1, -1)
    kept = tl.load(p_kept + row * WIDTH + column, column < count, other=-1)
    first = tl.maximum(prompt, last - room - tl.maximum(cap - prompt, 0))
    ids = tl.where(column < count, kept, first + column - count)
    ids = tl.where(ids < last, ids, -1)
    tl.store(p_ids + lane * s_ids + column, ids, column < select)


def select(layer: LayerView, ids: Tensor, cap: int, room: int) -> None:
    """``reference.select`` of every row of the step to int32 ``ids [N, K]``."""
    group, step, pools = layer.group, layer.step, layer.pools
    lanes, width = step.batch * group.lane_heads, ids.shape[1]
    if lanes == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(max(width, 16)))
    select_kernel[(lanes, triton.cdiv(width, block))](
        *(pools["kept"], pools["count"], pools["turn"], step.slots, step.lengths, ids),
        *(ids.stride(0), width, cap, room),
        LANE_HEADS=group.lane_heads,
        WIDTH=pools["kept"].shape[-1],
        TURN=pools["turn"].shape[-1],
        BLOCK=block,
        num_warps=1 if block <= 256 else 4,
    )
