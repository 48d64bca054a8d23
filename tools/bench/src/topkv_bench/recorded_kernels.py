"""The kernel of ``topkv_bench.recorded.write``; its reference stands there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def write(
    ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    limit: Tensor,
    table: Tensor,
    units: int,
    copies: int,
    stretch: int,
) -> None:
    """Launch; arguments are those of ``topkv_bench.recorded.write``."""
    lanes, select = ids.shape
    if not lanes:
        return
    steps, heads, width = table.shape
    recorded_kernel[(lanes, triton.cdiv(select, BLOCK))](
        *(ids, slots, lengths, limit, table, ids.stride(0), select),
        *(steps, heads, width, units, copies, stretch),
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["K", "steps", "heads", "width", "units", "copies", "stretch"])
def recorded_kernel(
    p_ids,
    p_slots,
    p_lengths,
    p_limit,
    p_table,
    s_ids,
    K,
    steps,
    heads,
    width,
    units,
    copies,
    stretch,
    BLOCK: tl.constexpr,
):
    """Write over ids. One program per lane and block of columns."""
    lane = tl.program_id(0).to(tl.int64)
    row, head = lane // heads, lane % heads
    slot = tl.load(p_slots + row).to(tl.int64)
    if (slot < 0) | (tl.load(p_limit + row) < units):
        return
    turn = 2 * (steps - 1)
    place = (tl.load(p_lengths + row) + slot * ((turn * 40503) >> 16)) % turn
    step = tl.minimum(place, turn - place)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    copy = column // width
    inside = (column < K) & (copy < copies)
    old = tl.load(p_table + (step * heads + head) * width + column % width, inside, other=-1)
    new = tl.where(old >= 0, old * stretch + copy.to(tl.int32), -1)
    tl.store(p_ids + lane * s_ids + column, new, column < K)
