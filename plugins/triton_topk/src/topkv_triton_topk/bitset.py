"""Sets of elements of a row as bits, for the kernels of exact top-k: bit i of word w is element
``32 * w + i``."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits(word):
    """Set bits per uint32; the compiler knows this form and makes one instruction of it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def pop(marks, word):
    """The element of the lowest set bit of each word, and the other bits; any if there is none."""
    return word * 32 + bits((marks ^ 0xFFFFFFFF) & (marks - 1)), marks & (marks - 1)


@triton.jit
def lowest(word, keep):
    """The ``keep`` lowest set bits of each word; all where there are no more."""
    position = tl.zeros_like(keep)
    left = keep
    # The longest run of low places, 31 at most, with no more than ``keep`` set bits.
    for level in tl.static_range(5):
        step = 16 >> level
        count = bits((word >> position.to(tl.uint32)) & ((1 << step) - 1))
        fits = count <= left
        left = tl.where(fits, left - count, left)
        position = tl.where(fits, position + step, position)
    one = tl.full((), 1, tl.uint32)
    return tl.where(bits(word) <= keep, word, word & ((one << position.to(tl.uint32)) - 1))


@triton.jit
def total_of(p_marks, used, BLOCK_W: tl.constexpr):
    """Set bits in the first ``used`` words."""
    lane = tl.arange(0, BLOCK_W)
    total = tl.zeros((BLOCK_W,), tl.int32)
    for first in range(0, used, BLOCK_W):
        at = first + lane
        total += bits(tl.load(p_marks + at, at < used, other=0).to(tl.uint32, bitcast=True))
    return tl.sum(total, 0)


@triton.jit
def merge(p_above, p_equal, p_ids, used, budget, BLOCK_W: tl.constexpr):
    """Indices of all elements above and the first ``budget`` equal ones, ascending."""
    lane = tl.arange(0, BLOCK_W)
    before = tl.full((), 0, tl.int32)
    equal_before = tl.full((), 0, tl.int32)
    for first in range(0, used, BLOCK_W):
        at = first + lane
        word = tl.load(p_above + at, at < used, other=0).to(tl.uint32, bitcast=True)
        equal = tl.load(p_equal + at, at < used, other=0).to(tl.uint32, bitcast=True)
        count = bits(equal)
        left = budget - (equal_before + tl.cumsum(count, 0) - count)
        word = word | lowest(equal, tl.minimum(tl.maximum(left, 0), 32))
        equal_before += tl.sum(count, 0)
        count = bits(word)
        target = before + tl.cumsum(count, 0) - count
        for turn in range(tl.max(count, 0)):
            bit = bits((word ^ 0xFFFFFFFF) & (word - 1))
            tl.store(p_ids + target + turn, at * 32 + bit, word != 0)
            word = word & (word - 1)
        before += tl.sum(count, 0)
