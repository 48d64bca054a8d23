"""The hot path of SnapKV in Triton, beside ``reference.select``: a copy of ids."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import LayerView, Selection
from topkv_snapkv.algorithm import SnapKV

BLOCK = 1024
"""Most ids of one program."""


@triton.jit
def select_kernel(
    p_kept,
    p_count,
    p_turn,
    p_slots,
    p_lengths,
    p_appended,
    p_ids,
    s_ids,
    select,
    cap,
    room,
    LANE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURN: tl.constexpr,
    QUERIES: tl.constexpr,
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
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + lane // LANE_HEADS), 1)
    last = tl.where(alive, length - new, -1)
    kept = tl.load(p_kept + row * WIDTH + column, column < count, other=-1)
    first = tl.maximum(prompt, last - room - tl.maximum(cap - prompt, 0))
    ids = tl.where(column < count, kept, first + column - count)
    ids = tl.where(ids < last, ids, -1)
    tl.store(p_ids + lane * s_ids + column, ids, column < select)


class SnapKVTriton(SnapKV):
    """SnapKV that chooses with the core's top-k kernels, and decodes in one of its own."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        if not self.covers:
            most = self.cap - self.params.window
            self.work = setup.topk(self.group.lane_heads, self.group.max_units, most)

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        group, step, pools = layer.group, layer.step, layer.pools
        lanes, width = step.batch * group.lane_heads, out.ids.shape[1]
        if lanes == 0:
            return out
        block = min(BLOCK, triton.next_power_of_2(max(width, 16)))
        select_kernel[(lanes, triton.cdiv(width, block))](
            p_kept=pools["kept"],
            p_count=pools["count"],
            p_turn=pools["turn"],
            p_slots=step.slots,
            p_lengths=step.lengths,
            p_appended=step.appended,
            p_ids=out.ids,
            s_ids=out.ids.stride(0),
            select=width,
            cap=self.cap,
            room=self.params.generated,
            LANE_HEADS=group.lane_heads,
            WIDTH=pools["kept"].shape[-1],
            TURN=pools["turn"].shape[-1],
            QUERIES=q.shape[1],
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
        )
        return out
