"""The kernel of ``regranulate``; its reference stands there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024


def regranulate(
    tokens: Tensor, closed: Tensor, ids: Tensor, extra: Tensor, work: Tensor, unit: int
) -> None:
    """Launches; arguments were checked."""
    lanes, select = tokens.shape
    longest = max(select, ids.shape[1], work.shape[1], 16)
    regranulate_kernel[(lanes,)](
        *(tokens, closed, ids, extra, work),
        *(tokens.stride(0), ids.stride(0), work.stride(0)),
        *(select, ids.shape[1], work.shape[1], lanes // len(closed)),
        UNIT=unit,
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(longest)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["K", "width", "units", "lane_heads"])
def regranulate_kernel(
    p_tokens,
    p_closed,
    p_ids,
    p_extra,
    p_work,
    s_tokens,
    s_ids,
    s_work,
    K,
    width,
    units,
    lane_heads,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane: clear the marks of its closed units, mark, and list what is marked.

    Equal units meet in one mark, so nothing is sorted. The time grows with the closed units, a
    byte each that is written and read again, and with K.
    """
    lane = tl.program_id(0).to(tl.int64)
    p_tokens += lane * s_tokens
    p_ids += lane * s_ids
    p_work += lane * s_work
    at = tl.arange(0, BLOCK)
    closed = tl.minimum(tl.load(p_closed + lane // lane_heads), units)
    for first in range(0, closed, BLOCK):
        tl.store(p_work + first + at, tl.zeros((BLOCK,), tl.uint8), first + at < closed)
    tl.debug_barrier()
    counted = tl.full((), 0, tl.int32)
    for first in range(0, K, BLOCK):
        token = tl.load(p_tokens + first + at, first + at < K, other=-1)
        valid = (token >= 0) & (token < closed * UNIT)
        tl.store(p_work + token // UNIT, tl.full((BLOCK,), 1, tl.uint8), valid)
        counted += tl.sum(valid.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.full((), 0, tl.int32)
    for first in range(0, closed, BLOCK):
        held = tl.load(p_work + first + at, first + at < closed, other=0).to(tl.int32)
        rank = count + tl.cumsum(held, 0) - held
        tl.store(p_ids + rank, first + at, held > 0)
        count += tl.sum(held, 0)
    for first in range(0, width, BLOCK):
        column = first + at
        tl.store(
            p_ids + column, tl.full((BLOCK,), -1, tl.int32), (column >= count) & (column < width)
        )
    tl.store(p_extra + lane, (count * UNIT - counted).to(tl.int64))
