"""What the kernels of exact top-k share: keys, the search for the K-th, and places.

A score becomes a 32-bit key of the same order. The search keeps two thresholds: at least K keys
reach the lower, fewer than K the higher. Each pass counts at two thresholds between them. One is
where the K-th key would lie if the keys between were spread evenly: on smooth scores it comes
close at once. The other is the middle, so that a pass at least halves what is left, whatever the
scores are: 6 to 11 passes on normal scores instead of the 20 of one bit a pass, about 20 where
the K-th key has equals, and never more than 32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_keys(score, valid):
    """uint32 of the order of the scores; 0, which no score maps to, where not valid.

    Integer arithmetic alone: float comparisons may flush subnormals to zero.
    """
    bits = score.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits)
    bits = tl.where(bits == 0x80000000, 0, bits)
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, keys, 0)


@triton.jit
def between(low, high, low_count, high_count, want):
    """Two thresholds inside (low, high), in order; ``high - low`` is 2 or more."""
    width = high - low
    # Below 1, because high_count < want: the product fits uint32 however it is rounded.
    part = (low_count - want).to(tl.float32) / (low_count - high_count).to(tl.float32)
    step = (width.to(tl.float32) * part).to(tl.uint32)
    step = tl.minimum(tl.maximum(step, 1), width - 1)
    half = width >> 1
    return low + tl.minimum(step, half), low + tl.maximum(step, half)


@triton.jit
def narrow(low, high, low_count, high_count, first, second, first_count, second_count, want):
    """The closest thresholds, of four in order, around the K-th key, with their counts."""
    reach_first = first_count >= want
    reach_second = second_count >= want
    new_low = tl.where(reach_second, second, tl.where(reach_first, first, low))
    new_low_count = tl.where(
        reach_second, second_count, tl.where(reach_first, first_count, low_count)
    )
    new_high = tl.where(reach_second, high, tl.where(reach_first, second, first))
    new_high_count = tl.where(
        reach_second, high_count, tl.where(reach_first, second_count, first_count)
    )
    return new_low, new_high, new_low_count, new_high_count


@triton.jit
def search(keys, valid, count, want, most):
    """Search among ``count`` valid keys of a block of at most 2**15, ``1 <= want <= count``.

    Returns ``low, low_count, high_count``. Ends when ``low_count``, the keys that reach ``low``,
    lies within ``[want, most]``, or else when ``low`` is the key of rank ``want`` itself; then
    ``high_count`` keys are larger.
    """
    low = tl.min(tl.where(valid, keys, 0xFFFFFFFF), 0)
    high = tl.max(keys, 0) + 1
    low_count = tl.full((), 0, tl.int32) + count
    high_count = tl.full((), 0, tl.int32)
    while (low_count > most) & (high - low > 1):
        first, second = between(low, high, low_count, high_count, want)
        # Two counts share one reduction: each fits 16 bits.
        one = tl.where(keys >= first, 1, 0).to(tl.uint32)
        pair = tl.sum(one + tl.where(keys >= second, 65536, 0).to(tl.uint32), 0)
        first_count = (pair & 0xFFFF).to(tl.int32)
        second_count = (pair >> 16).to(tl.int32)
        low, high, low_count, high_count = narrow(
            low, high, low_count, high_count, first, second, first_count, second_count, want
        )
    return low, low_count, high_count


@triton.jit
def bisect(keys, want, BLOCK: tl.constexpr):
    """As ``search``, bit by bit from the top, with one count a pass; more than ``want`` are valid.

    More passes than ``search``, each cheaper and with nothing before the first: on an H200 faster
    where a row is all that a program has, and on ties.
    """
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
def cut(low, low_count, high_count, want):
    """Keys above the threshold are taken, and as many equal ones as the budget says.

    ``low`` is at least 1, the least key there is being larger, so nothing wraps.
    """
    exact = low_count == want
    return tl.where(exact, low - 1, low), tl.where(exact, 0, want - high_count)


@triton.jit
def place(keys, threshold, budget, above_before, equal_before):
    """Which elements are taken and where they go, given what earlier elements took."""
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
def pad(p_ids, first, K, BLOCK: tl.constexpr):
    """-1 from place ``first`` on."""
    lane = tl.arange(0, BLOCK)
    for start in range(first, K, BLOCK):
        tl.store(p_ids + start + lane, -1, start + lane < K)


@triton.jit
def walk(p_scores, p_ids, length, want, BLOCK: tl.constexpr):
    """Select from memory, one pass over the row per step; ``1 <= want <= length``.

    Writes ``ids[:want]``. For any scores and any length, and slower than a block in registers.
    """
    lane = tl.arange(0, BLOCK)
    low = tl.full((), 1, tl.uint32)
    high = tl.full((), 0xFF800001, tl.uint32)  # One more than the key of +inf.
    low_count = tl.full((), 0, tl.int32) + length
    high_count = tl.full((), 0, tl.int32)
    while (low_count > want) & (high - low > 1):
        first, second = between(low, high, low_count, high_count, want)
        reach_first = tl.zeros((BLOCK,), tl.int32)
        reach_second = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, length, BLOCK):
            valid = start + lane < length
            keys = order_keys(tl.load(p_scores + start + lane, valid, other=0.0), valid)
            reach_first += (keys >= first).to(tl.int32)
            reach_second += (keys >= second).to(tl.int32)
        first_count = tl.sum(reach_first, 0)
        second_count = tl.sum(reach_second, 0)
        low, high, low_count, high_count = narrow(
            low, high, low_count, high_count, first, second, first_count, second_count, want
        )
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
