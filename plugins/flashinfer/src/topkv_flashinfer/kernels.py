"""Conversions between topkv's contract and FlashInfer's, in Triton; see ``reference``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_kernel(
    p_table,
    p_lengths,
    p_indices,
    p_last,
    width,
    s_table,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    LANES: tl.constexpr = 1,
    p_queries=None,
    p_seen=None,
):
    """Grid (lanes, blocks of columns): CSR of ``width`` pages a lane, 0 where unused.

    Also the tokens on the last page of a lane that is said to have all those pages, which makes
    its length come out right: negative where the lane ends on an earlier page.

    With QUERIES each query of a row has LANES lanes of its own, over the table of the row's: of
    the tokens that it sees, whose number goes to ``p_seen``.
    """
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = lane
    if QUERIES > 1:
        row, nth = lane // (QUERIES * LANES), (lane // LANES % QUERIES).to(tl.int32)
        source = row * LANES + lane % LANES
    length = tl.load(p_lengths + source)
    if QUERIES > 1:
        queries = tl.load(p_queries + row)
        length = tl.where(nth < queries, tl.maximum(length - (queries - 1 - nth), 0), 0)
        if tl.program_id(1) == 0:
            tl.store(p_seen + lane, length)
    used = column * UNIT < length
    page = tl.load(p_table + source * s_table + column, used & (column < width), other=0)
    tl.store(p_indices + lane * width + column, page, column < width)
    if tl.program_id(1) == 0:
        tl.store(p_last + lane, length - (width - 1) * UNIT)


@triton.jit(do_not_specialize=["count"])
def natural_kernel(p_lse, count, FACTOR: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Turn log-sum-exps to the base of 2 into natural ones, in place."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(p_lse + at, at < count, other=0.0)
    tl.store(p_lse + at, lse * FACTOR, at < count)


@triton.jit
def works_kernel(
    p_lane,
    p_first,
    p_behind,
    p_lengths,
    p_kv_len,
    p_kv_start,
    p_kv_end,
    works,
    BLOCK: tl.constexpr,
):
    """Cut the planned works down to the lengths; one with no token left becomes 0 to 0."""
    work = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = work < works
    lane = tl.load(p_lane + work, real, other=0)
    first = tl.load(p_first + work, real, other=0)
    behind = tl.load(p_behind + work, real, other=0)
    length = tl.load(p_lengths + lane, real, other=0)
    any_left = first < length
    tl.store(p_kv_len + work, length, real)
    tl.store(p_kv_start + work, tl.where(any_left, first, 0), real)
    tl.store(p_kv_end + work, tl.where(any_left, tl.minimum(behind, length), 0), real)
