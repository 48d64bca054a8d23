"""The search for the key of a rank among those that a program holds in registers.

It keeps two thresholds: at least K keys reach the lower, fewer than K the higher. Each pass counts
at two thresholds between them. One is where the K-th key would be if the keys between were spread
evenly: on smooth scores it comes close at once. The other is the middle, so that a pass at least
halves what is left, whatever the scores are: 6 to 11 passes on normal scores instead of the 20 of
one bit a pass, about 20 where the K-th key has equals, and never more than 32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


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
    is within ``[want, most]``, or else when ``low`` is the key of rank ``want`` itself; then
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
