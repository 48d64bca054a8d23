"""The kernel of ``topkv_bench.drift.write``; its reference stands there."""

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
    layer: int,
    units: int,
    rate: int,
) -> None:
    """Launch; arguments are those of ``topkv_bench.drift.write``."""
    lanes, select = ids.shape
    if not lanes:
        return
    drift_kernel[(lanes, triton.cdiv(select, BLOCK))](
        *(ids, slots, lengths, limit, ids.stride(0), select, lanes // len(slots)),
        *(layer, units, rate),
        BLOCK=BLOCK,
    )


@triton.jit
def mixed(number):
    """Mix the lower 32 bits of an int64 to 32 bits; see ``drift.mixed``."""
    number = number & 0xFFFFFFFF
    number = number ^ (number >> 16)
    number = (number * 0x21F0AAAD) & 0xFFFFFFFF
    number = number ^ (number >> 15)
    number = (number * 0x735A2D97) & 0xFFFFFFFF
    return number ^ (number >> 15)


@triton.jit(do_not_specialize=["K", "lane_heads", "layer", "units", "rate"])
def drift_kernel(
    p_ids,
    p_slots,
    p_lengths,
    p_limit,
    s_ids,
    K,
    lane_heads,
    layer,
    units,
    rate,
    BLOCK: tl.constexpr,
):
    """Write over ids. One program per lane and block of columns, which are independent."""
    lane = tl.program_id(0).to(tl.int64)
    row, head = lane // lane_heads, lane % lane_heads
    slot = tl.load(p_slots + row).to(tl.int64)
    length = tl.load(p_lengths + row).to(tl.int64)
    room = (units >= K) & (tl.load(p_limit + row) >= units)
    rank = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cells = p_ids + lane * s_ids + rank
    old = tl.load(cells, rank < K, other=-1)
    seed = mixed((slot * lane_heads + head) * 8191 + layer)
    phase = (rank * 40503 + seed) & 0xFFFF
    first = rank * units // K
    size = tl.maximum((rank + 1) * units // K - first, 1)
    walked = mixed(seed + rank * 40503) + ((length * rate + phase) >> 16)
    new = first + walked % size
    tl.store(cells, new.to(tl.int32), (rank < K) & (old >= 0) & room)
