"""Exact top-k in Triton: which kernels take a row, and those of short rows and of huge K.

One prefix sum gives every selected element its place, so that ids come out in ascending order
and of the keys that equal the K-th those of lowest index are taken.

A row that fits one block stays in registers. A longer row goes through ``topk_long``.
Only where K is so large that not even the candidates would fit a block does one program walk the
row from memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topkv.ops import topk_long
from topkv.ops.topk_search import bisect, cut, order_keys, pad, place, walk

MAX_BLOCK = 16384
"""Longest row that one program holds in registers."""

NARROW = 2048
"""Longest row that is read before its length is known."""

PAD_BLOCK = 512
"""Ids per iteration where a program writes padding."""

STREAM_BLOCK = 8192
"""Elements per iteration where a program walks its row."""


@triton.jit
def _row(p_scores, length, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return tl.load(p_scores + index, index < length, other=0.0)


@triton.jit
def _best(score, p_ids, length, K, BLOCK: tl.constexpr):
    """The K best of the first ``length`` scores of a block; ``length > K``."""
    index = tl.arange(0, BLOCK)
    valid = index < length
    keys = order_keys(score, valid)
    low, low_count, high_count = bisect(keys, K, BLOCK)
    threshold, budget = cut(low, low_count, high_count, K)
    taken, where = place(keys, threshold, budget, 0, 0)
    tl.store(p_ids + where, index, taken & valid)


@triton.jit(do_not_specialize=["columns", "K"])
def select_kernel(
    p_scores,
    p_lengths,
    p_ids,
    s_scores,
    s_ids,
    columns,
    K,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
):
    """A row of at most ``BLOCK`` columns.

    There are as many columns as the longest request may ever need. A shorter one takes the time of
    the least of three blocks that holds it.
    """
    HALF: tl.constexpr = BLOCK // 2
    EIGHTH: tl.constexpr = BLOCK // 8
    n = tl.program_id(0).to(tl.int64)
    p_scores += n * s_scores
    p_ids += n * s_ids
    if BLOCK <= NARROW:
        # The whole row, garbage included: its load need not wait for the length.
        index = tl.arange(0, BLOCK)
        score = tl.load(p_scores + index, index < columns, other=0.0)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length <= K:
        lane = tl.arange(0, BLOCK_K)
        for first in range(0, K, BLOCK_K):
            at = first + lane
            tl.store(p_ids + at, tl.where(at < length, at, -1), at < K)
    elif BLOCK <= NARROW:
        _best(score, p_ids, length, K, BLOCK)
    elif length > HALF:
        _best(_row(p_scores, length, BLOCK), p_ids, length, K, BLOCK)
    elif length > EIGHTH:
        _best(_row(p_scores, length, HALF), p_ids, length, K, HALF)
    else:
        _best(_row(p_scores, length, EIGHTH), p_ids, length, K, EIGHTH)


@triton.jit(do_not_specialize=["columns", "K"])
def stream_kernel(
    p_scores,
    p_lengths,
    p_ids,
    s_scores,
    s_ids,
    columns,
    K,
    BLOCK: tl.constexpr,
):
    """A row of any length, and any K."""
    n = tl.program_id(0).to(tl.int64)
    p_scores += n * s_scores
    p_ids += n * s_ids
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length <= K:
        lane = tl.arange(0, BLOCK)
        for first in range(0, length, BLOCK):
            tl.store(p_ids + first + lane, first + lane, first + lane < length)
        pad(p_ids, length, K, BLOCK)
    else:
        walk(p_scores, p_ids, length, K, BLOCK)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


def workspace(rows: int, columns: int, select: int, device: torch.device) -> Tensor | None:
    """See :func:`topkv.ops.topk.workspace`."""
    if columns <= MAX_BLOCK:
        return None
    block = topk_long.candidate_block(columns, select)
    if block > topk_long.MAX_CANDIDATES:
        return None
    return topk_long.workspace(rows, columns, block, device)


def topk(scores: Tensor, lengths: Tensor, ids: Tensor, work: Tensor | None) -> None:
    """Launches; the contract stands in :func:`topkv.ops.topk.topk`."""
    rows, columns = scores.shape
    select = ids.shape[1]
    if columns > MAX_BLOCK:
        block = topk_long.candidate_block(columns, select)
        if block <= topk_long.MAX_CANDIDATES:
            if work is None:
                work = topk_long.workspace(rows, columns, block, ids.device)
            topk_long.topk(scores, lengths, ids, block, work)
            return
        stream_kernel[(rows,)](
            *(scores, lengths, ids, scores.stride(0), ids.stride(0), columns, select),
            BLOCK=STREAM_BLOCK,
            num_warps=16,
        )
        return
    block = max(16, triton.next_power_of_2(columns))
    select_kernel[(rows,)](
        *(scores, lengths, ids, scores.stride(0), ids.stride(0), columns, select),
        BLOCK=block,
        BLOCK_K=min(block, PAD_BLOCK),
        NARROW=NARROW,
        num_warps=_warps(block),
    )
