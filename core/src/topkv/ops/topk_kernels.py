"""Exact top-k in Triton by radix select: the bits of the K-th key, from the highest down.

A score becomes a 32-bit key of the same order. Counting the keys that reach a threshold gives the
next bits of the K-th, until as many as K reach it or it is the K-th key itself. One prefix sum
then gives every selected element its place, so that ids come out in ascending order and of the
keys that equal the K-th those of lowest index are taken.

A row that fits one block stays in registers, where a pass costs little and finds one bit. A longer
row is read from memory in every pass, by one program, so a pass finds two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 16384
"""Longest row that one program holds in registers."""

NARROW = 2048
"""Longest row that is read before its length is known."""

PAD_BLOCK = 512
"""Ids per iteration where a row in registers has no more than K elements."""

WALK_BLOCK = 8192
"""Elements per iteration where a program walks its row."""


@triton.jit
def order_keys(score, valid):
    """Return uint32 keys in the order of the scores; 0, which no score maps to, where not valid.

    Integer arithmetic alone: float comparisons may flush subnormals to zero.
    """
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, keys, 0)


@triton.jit
def cut(low, low_count, high_count, want):
    """Threshold and budget: keys above the threshold are taken, and ``budget`` keys equal to it.

    ``low_count`` keys reach ``low`` and ``high_count`` are larger, or ``low_count`` is ``want``.
    ``low`` is at least 1, the least key there is being larger, so nothing wraps.
    """
    exact = low_count == want
    return tl.where(exact, low - 1, low), tl.where(exact, 0, want - high_count)


@triton.jit
def place(keys, threshold, budget, above_before, equal_before):
    """Return for each element of a block if it is taken, and its column in the result.

    ``above_before`` and ``equal_before`` count the elements of earlier blocks above and at the
    threshold; ``budget`` of those at it are taken.
    """
    above = keys > threshold
    equal = keys == threshold
    # Two counts share one scan: a block has at most 2**15 elements.
    pair = above.to(tl.int32) + tl.where(equal, 1 << 16, 0)
    before = tl.cumsum(pair, 0) - pair
    above_rank = above_before + (before & 0xFFFF)
    equal_rank = equal_before + ((before >> 16) & 0xFFFF)
    taken = above | (equal & (equal_rank < budget))
    return taken, above_rank + tl.minimum(equal_rank, budget)


@triton.jit
def _bisect(keys, want, BLOCK: tl.constexpr):
    """``low, low_count, high_count`` for ``cut``; more than ``want`` keys are valid."""
    low = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    low_count = tl.full((), BLOCK, tl.int32)
    high_count = tl.full((), 0, tl.int32)
    while (bit > 0) & (low_count != want):
        count = tl.sum((keys >= low + bit).to(tl.int32), 0)
        enough = count >= want
        low_count = tl.where(enough, count, low_count)
        high_count = tl.where(enough, high_count, count)
        low = tl.where(enough, low + bit, low)
        bit = bit >> 1
    return low, low_count, high_count


@triton.jit
def walk(p_scores, p_ids, length, want, BLOCK: tl.constexpr):
    """Select from memory; ``1 <= want < length``. Writes ``ids[:want]``.

    For any scores and any length: 16 passes over the row at most, and one to write.
    """
    lane = tl.arange(0, BLOCK)
    low = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    low_count = tl.full((), 0, tl.int32) + length
    high_count = tl.full((), 0, tl.int32)
    while (step > 0) & (low_count != want):
        one = tl.zeros((BLOCK,), tl.int32)
        two = tl.zeros((BLOCK,), tl.int32)
        three = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, length, BLOCK):
            valid = start + lane < length
            keys = order_keys(tl.load(p_scores + start + lane, valid, other=0.0), valid)
            one += (keys >= low + step).to(tl.int32)
            two += (keys >= low + 2 * step).to(tl.int32)
            three += (keys >= low + 3 * step).to(tl.int32)
        first, second, third = tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)
        reached = (first >= want).to(tl.uint32) + (second >= want) + (third >= want)
        low += step * reached
        high_count = tl.where(reached == 2, third, high_count)
        high_count = tl.where(reached == 1, second, high_count)
        high_count = tl.where(reached == 0, first, high_count)
        low_count = tl.where(reached >= 1, first, low_count)
        low_count = tl.where(reached >= 2, second, low_count)
        low_count = tl.where(reached == 3, third, low_count)
        step = step >> 2
    threshold, budget = cut(low, low_count, high_count, want)
    above = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        valid = start + lane < length
        keys = order_keys(tl.load(p_scores + start + lane, valid, other=0.0), valid)
        taken, where = place(keys, threshold, budget, above, equal)
        tl.store(p_ids + where, start + lane, taken & valid)
        above += tl.sum((keys > threshold).to(tl.int32), 0)
        equal += tl.sum((keys == threshold).to(tl.int32), 0)


@triton.jit
def _all(p_ids, length, K, BLOCK: tl.constexpr):
    """Write every index of a row of at most K elements, and -1 behind them."""
    lane = tl.arange(0, BLOCK)
    for start in range(0, K, BLOCK):
        at = start + lane
        tl.store(p_ids + at, tl.where(at < length, at, -1), at < K)


@triton.jit
def _row(p_scores, length, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    return tl.load(p_scores + index, index < length, other=0.0)


@triton.jit
def _best(score, p_ids, length, K, BLOCK: tl.constexpr):
    """Write the K best of the first ``length`` scores of a block; ``length > K``."""
    index = tl.arange(0, BLOCK)
    valid = index < length
    keys = order_keys(score, valid)
    low, low_count, high_count = _bisect(keys, K, BLOCK)
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
    """Select from a row of at most ``BLOCK`` columns.

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
        score = _row(p_scores, columns, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length <= K:
        _all(p_ids, length, K, BLOCK_K)
    elif BLOCK <= NARROW:
        _best(score, p_ids, length, K, BLOCK)
    elif length > HALF:
        _best(_row(p_scores, length, BLOCK), p_ids, length, K, BLOCK)
    elif length > EIGHTH:
        _best(_row(p_scores, length, HALF), p_ids, length, K, HALF)
    else:
        _best(_row(p_scores, length, EIGHTH), p_ids, length, K, EIGHTH)


@triton.jit(do_not_specialize=["columns", "K"])
def walk_kernel(p_scores, p_lengths, p_ids, s_scores, s_ids, columns, K, BLOCK: tl.constexpr):
    """Select from a row of any length, with any K."""
    n = tl.program_id(0).to(tl.int64)
    p_scores += n * s_scores
    p_ids += n * s_ids
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length <= K:
        _all(p_ids, length, K, BLOCK)
    else:
        walk(p_scores, p_ids, length, K, BLOCK)


def topk(scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Launch, for rows of any length; the contract stands in :func:`topkv.ops.topk.topk`."""
    rows, columns = scores.shape
    sizes = {
        "s_scores": scores.stride(0),
        "s_ids": ids.stride(0),
        "columns": columns,
        "K": ids.shape[1],
    }
    if columns > MAX_BLOCK:
        walk_kernel[(rows,)](scores, lengths, ids, **sizes, BLOCK=WALK_BLOCK, num_warps=16)
        return
    block = max(16, triton.next_power_of_2(columns))
    select_kernel[(rows,)](
        scores,
        lengths,
        ids,
        **sizes,
        BLOCK=block,
        BLOCK_K=min(block, PAD_BLOCK),
        NARROW=NARROW,
        num_warps=min(max(block // 512, 1), 8),
    )
