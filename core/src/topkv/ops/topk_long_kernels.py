"""The kernels of exact top-k of long rows; ``topk_long`` says how they work together."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.topk_search import cut, order_keys, pad, place, search, walk


@triton.jit
def _bits(word):
    """Set bits per uint32; the compiler knows this form and makes one instruction of it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _lowest_bits(word, keep):
    """The ``keep`` lowest set bits of each word; all where there are no more."""
    position = tl.zeros_like(keep)
    left = keep
    # The longest run of low places, 31 at most, with no more than ``keep`` set bits.
    for level in tl.static_range(5):
        step = 16 >> level
        count = _bits((word >> position.to(tl.uint32)) & ((1 << step) - 1))
        fits = count <= left
        left = tl.where(fits, left - count, left)
        position = tl.where(fits, position + step, position)
    one = tl.full((), 1, tl.uint32)
    return tl.where(_bits(word) <= keep, word, word & ((one << position.to(tl.uint32)) - 1))


@triton.jit(do_not_specialize=["columns", "words", "K"])
def pivot_kernel(
    p_scores,
    p_lengths,
    p_work,
    s_scores,
    s_work,
    columns,
    words,
    K,
    sigmas,
    SAMPLES: tl.constexpr,
    SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row; rows of at most ``BLOCK`` elements get no pivot and need none.

    Not launched early itself: so the scores are complete when it starts, and the programs of the
    next kernel, which start while this one runs, may read them without waiting.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length > BLOCK:
        # A random place in each of SAMPLES equal parts: the fraction comes from a hash, 16 bits.
        part = tl.arange(0, SAMPLES)
        mix = part.to(tl.uint32) * 0x9E3779B1
        mix = (mix ^ (mix >> 15)) * 0x85EBCA77
        fraction = (mix ^ (mix >> 13)) >> 16
        place16 = part.to(tl.int64) * 65536 + fraction.to(tl.int64)
        at = (place16 * length) // (65536 * SAMPLES)
        valid = at < length
        keys = order_keys(tl.load(p_scores + n * s_scores + at, valid, other=0.0), valid)
        mean = SAMPLES * (K.to(tl.float32) / length.to(tl.float32))
        want = (mean + sigmas * tl.sqrt(mean) + 4).to(tl.int32)
        want = tl.minimum(tl.maximum(want, 1), SAMPLES)
        low, _, _ = search(keys, valid, SAMPLES, want, want + want // SLACK)
        tl.store(p_work + n * s_work + 2 * words + BLOCK, low.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["words"])
def mark_kernel(
    p_scores,
    p_lengths,
    p_work,
    s_scores,
    s_work,
    columns,
    words,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows, slices of ``WORDS`` words). Bit i of word w is element ``32 * w + i``.

    The slice is in registers before the pivot is known. Every program waits, also one that has
    nothing to do: the next kernel trusts that all of the first is over when this one is.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    slice_ = tl.program_id(1)
    word = slice_ * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    at = word[:, None] * 32 + bit[None, :]
    score = tl.load(p_scores + n * s_scores + at, at < columns, other=0.0)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (length > BLOCK) & (slice_ * WORDS * 32 < length):
        p_work += n * s_work
        pivot = tl.load(p_work + 2 * words + BLOCK).to(tl.uint32, bitcast=True)
        # Keys of invalid elements are 0, which neither exceeds nor equals a pivot.
        keys = order_keys(score, at < length)
        mask = (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))[None, :]
        zero = tl.full((), 0, tl.uint32)
        above = tl.sum(tl.where(keys > pivot, mask, zero), 1)
        equal = tl.sum(tl.where(keys == pivot, mask, zero), 1)
        tl.store(p_work + word, above.to(tl.int32, bitcast=True))
        tl.store(p_work + words + word, equal.to(tl.int32, bitcast=True))


@triton.jit
def _totals(p_above, p_equal, used, BLOCK_W: tl.constexpr):
    """Set bits in the first ``used`` words of each kind."""
    lane = tl.arange(0, BLOCK_W)
    above = tl.zeros((BLOCK_W,), tl.int32)
    equal = tl.zeros((BLOCK_W,), tl.int32)
    for first in range(0, used, BLOCK_W):
        at = first + lane
        above += _bits(tl.load(p_above + at, at < used, other=0).to(tl.uint32, bitcast=True))
        equal += _bits(tl.load(p_equal + at, at < used, other=0).to(tl.uint32, bitcast=True))
    return tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def _list(p_above, p_equal, p_list, used, budget, BLOCK_W: tl.constexpr):
    """Indices of all elements above and the first ``budget`` equal ones, ascending."""
    lane = tl.arange(0, BLOCK_W)
    before = tl.full((), 0, tl.int32)
    equal_before = tl.full((), 0, tl.int32)
    for first in range(0, used, BLOCK_W):
        at = first + lane
        word = tl.load(p_above + at, at < used, other=0).to(tl.uint32, bitcast=True)
        if budget > 0:
            equal = tl.load(p_equal + at, at < used, other=0).to(tl.uint32, bitcast=True)
            count = _bits(equal)
            left = budget - (equal_before + tl.cumsum(count, 0) - count)
            word = word | _lowest_bits(equal, tl.minimum(tl.maximum(left, 0), 32))
            equal_before += tl.sum(count, 0)
        count = _bits(word)
        target = before + tl.cumsum(count, 0) - count
        # One bit of every word per round: as many rounds as the fullest word has bits.
        for turn in range(tl.max(count, 0)):
            bit = _bits((word ^ 0xFFFFFFFF) & (word - 1))
            tl.store(p_list + target + turn, at * 32 + bit, word != 0)
            word = word & (word - 1)
        if first + BLOCK_W < used:
            before += tl.sum(count, 0)


@triton.jit
def _select(p_scores, p_list, p_ids, listed, count, want, BLOCK: tl.constexpr):
    """The ``want`` best of ``count`` candidates; the first ``count`` elements if not listed."""
    lane = tl.arange(0, BLOCK)
    valid = lane < count
    index = tl.load(p_list + lane, valid & listed, other=0)
    index = tl.where(listed, index, lane)
    keys = order_keys(tl.load(p_scores + index, valid, other=0.0), valid)
    low, low_count, high_count = search(keys, valid, count, want, want)
    threshold, budget = cut(low, low_count, high_count, want)
    taken, where = place(keys, threshold, budget, 0, 0)
    tl.store(p_ids + where, index, taken & valid)


@triton.jit(do_not_specialize=["columns", "words", "K"])
def collect_kernel(
    p_scores,
    p_lengths,
    p_work,
    p_ids,
    s_scores,
    s_work,
    s_ids,
    columns,
    words,
    K,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_WALK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    n = tl.program_id(0).to(tl.int64)
    p_scores += n * s_scores
    p_ids += n * s_ids
    p_above = p_work + n * s_work
    p_equal = p_above + words
    p_list = p_equal + words
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    want = tl.minimum(length, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = length
    listed = length > BLOCK
    if listed:
        used = (length + 31) // 32
        above, equal = _totals(p_above, p_equal, used, BLOCK_W)
        budget = tl.maximum(want - above, 0)
        count = tl.where(budget > equal, BLOCK + 1, above + budget)
        if count <= BLOCK:
            _list(p_above, p_equal, p_list, used, budget, BLOCK_W)
            # Threads read what others wrote.
            tl.debug_barrier()
    if want > 0:
        if count > BLOCK:
            walk(p_scores, p_ids, length, want, BLOCK_WALK)
        elif count > BLOCK // 2:
            _select(p_scores, p_list, p_ids, listed, count, want, BLOCK)
        else:
            _select(p_scores, p_list, p_ids, listed, count, want, BLOCK // 2)
    pad(p_ids, want, K, BLOCK_K)
