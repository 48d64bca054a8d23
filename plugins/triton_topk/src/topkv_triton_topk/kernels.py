"""The kernels of exact top-k of long rows; ``launch`` says how they work together."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from topkv.ops.topk_kernels import cut, order_keys, place, walk
from topkv_triton_topk.bitset import bits, merge, pop, total_of
from topkv_triton_topk.search import search


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

    The next kernel may start once every program of this one has waited for what is before it: so
    its programs, which start while this one runs, may read the scores without waiting.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    if length > BLOCK:
        # A random place in each of SAMPLES equal parts, as a fraction of the row in 32 bits: the
        # part gives the upper ones, a hash of it those below.
        part = tl.arange(0, SAMPLES).to(tl.uint32)
        mix = part * 0x9E3779B1
        mix = (mix ^ (mix >> 15)) * 0x85EBCA77
        fraction = part * (4294967296 // SAMPLES) + (mix ^ (mix >> 13)) // SAMPLES
        at = tl.umulhi(fraction, tl.zeros_like(fraction) + length.to(tl.uint32))
        keys = order_keys(tl.load(p_scores + n * s_scores + at), True)
        mean = SAMPLES * (K.to(tl.float32) / length.to(tl.float32))
        want = (mean + sigmas * tl.sqrt(mean) + 4).to(tl.int32)
        want = tl.minimum(tl.maximum(want, 1), SAMPLES)
        low, _, _ = search(keys, True, SAMPLES, want, want + want // SLACK)
        p_pivot = p_work + n * s_work + 2 * words + 2 * BLOCK
        tl.store(p_pivot, low.to(tl.int32, bitcast=True))
        tl.store(p_pivot + 1, 0)


@triton.jit
def _pair(score, index):
    """Key and index of an element in one integer."""
    return (order_keys(score, True).to(tl.int64) << 32) | index.to(tl.int64)


@triton.jit(do_not_specialize=["words"])
def mark_kernel(
    p_scores,
    p_lengths,
    p_work,
    p_pairs,
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
    nothing to do: the next kernel trusts that all of the first is over when this one is. What is
    above the pivot goes to a part of the row's list that the slice takes when it knows its size.
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
    # Keys of invalid elements are 0, which neither exceeds nor equals a pivot.
    keys = order_keys(score, at < length)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (length > BLOCK) & (slice_ * WORDS * 32 < length):
        p_work += n * s_work
        p_pairs += n * (s_work // 2) + words
        p_pivot = p_work + 2 * words + 2 * BLOCK
        pivot = tl.load(p_pivot).to(tl.uint32, bitcast=True)
        mask = (tl.full((), 1, tl.uint32) << bit.to(tl.uint32))[None, :]
        zero = tl.full((), 0, tl.uint32)
        above = tl.sum(tl.where(keys > pivot, mask, zero), 1)
        equal = tl.sum(tl.where(keys == pivot, mask, zero), 1)
        tl.store(p_work + word, above.to(tl.int32, bitcast=True))
        tl.store(p_work + words + word, equal.to(tl.int32, bitcast=True))
        # Read again, one word a thread, for which threads have to wait for each other once.
        tl.debug_barrier()
        above = tl.load(p_work + word).to(tl.uint32, bitcast=True)
        count = bits(above)
        total = tl.sum(count, 0)
        first = tl.atomic_add(p_pivot + 1, total, sem="relaxed")
        tl.store(p_pivot + 4 + 2 * slice_, first)
        tl.store(p_pivot + 5 + 2 * slice_, total)
        target = first + tl.cumsum(count, 0) - count
        # Two bits of every word per round, so that two keys are on their way.
        for turn in range(0, tl.max(count, 0), 2):
            one, above = pop(above, word)
            two, above = pop(above, word)
            to = target + turn
            has_one = (turn < count) & (to < BLOCK)
            has_two = (turn + 1 < count) & (to + 1 < BLOCK)
            first_score = tl.load(p_scores + n * s_scores + one, has_one, other=0.0)
            second_score = tl.load(p_scores + n * s_scores + two, has_two, other=0.0)
            tl.store(p_pairs + to, _pair(first_score, one), has_one)
            tl.store(p_pairs + to + 1, _pair(second_score, two), has_two)


@triton.jit
def _listed(p_parts, slices, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Places of candidates in the list, in order of index; parts of the list are in any order."""
    part = tl.arange(0, 1 << LEVELS)
    start = tl.load(p_parts + 2 * part, part < slices, other=0)
    count = tl.load(p_parts + 2 * part + 1, part < slices, other=0)
    before = tl.cumsum(count, 0) - count
    # The last part that starts at or before each candidate.
    lane = tl.arange(0, BLOCK)
    mine = tl.zeros((BLOCK,), tl.int32)
    for level in tl.static_range(LEVELS):
        probe = mine + (1 << (LEVELS - 1 - level))
        mine = tl.where(tl.gather(before, probe, 0) <= lane, probe, mine)
    return lane + tl.gather(start - before, mine, 0)


@triton.jit
def _select(keys, index, valid, p_ids, count, want):
    """The ``want`` best of ``count`` candidates, which are in order of index."""
    low, low_count, high_count = search(keys, valid, count, want, want)
    threshold, budget = cut(low, low_count, high_count, want)
    taken, where = place(keys, threshold, budget, 0, 0)
    tl.store(p_ids + where, index, taken & valid)


@triton.jit
def _select_listed(
    p_pairs, p_parts, p_ids, slices, count, want, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    """Select among the candidates above the pivot."""
    valid = tl.arange(0, BLOCK) < count
    pair = tl.load(p_pairs + _listed(p_parts, slices, BLOCK, LEVELS), valid, other=0)
    _select((pair >> 32).to(tl.uint32), pair.to(tl.int32), valid, p_ids, count, want)


@triton.jit
def _select_short(p_scores, p_ids, length, want, BLOCK: tl.constexpr):
    """Select among all of a row that fits a block."""
    index = tl.arange(0, BLOCK)
    valid = index < length
    keys = order_keys(tl.load(p_scores + index, valid, other=0.0), valid)
    _select(keys, index, valid, p_ids, length, want)


@triton.jit(do_not_specialize=["columns", "words", "K"])
def collect_kernel(
    p_scores,
    p_lengths,
    p_work,
    p_pairs,
    p_ids,
    s_scores,
    s_work,
    s_ids,
    columns,
    words,
    K,
    WORDS: tl.constexpr,
    LEVELS: tl.constexpr,
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
    p_pairs += n * (s_work // 2) + words
    p_pivot = p_equal + words + 2 * BLOCK
    p_parts = p_pivot + 4
    length = tl.minimum(tl.maximum(tl.load(p_lengths + n), 0), columns)
    want = tl.minimum(length, K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if length > BLOCK:
        slices = tl.cdiv(length, WORDS * 32)
        count = tl.load(p_pivot + 1)
        used = (length + 31) // 32
        if count < want:
            # The pivot is high: its equals are taken as well, or everything is walked.
            if total_of(p_equal, used, BLOCK_W) >= want - count:
                merge(p_above, p_equal, p_ids, used, want - count, BLOCK_W)
            else:
                walk(p_scores, p_ids, length, want, BLOCK_WALK)
        elif count > BLOCK:
            walk(p_scores, p_ids, length, want, BLOCK_WALK)
        elif count > BLOCK // 2:
            _select_listed(p_pairs, p_parts, p_ids, slices, count, want, BLOCK, LEVELS)
        else:
            _select_listed(p_pairs, p_parts, p_ids, slices, count, want, BLOCK // 2, LEVELS)
    elif length > BLOCK // 2:
        _select_short(p_scores, p_ids, length, want, BLOCK)
    elif length > 0:
        _select_short(p_scores, p_ids, length, want, BLOCK // 2)
    lane = tl.arange(0, BLOCK_K)
    for start in range(want, K, BLOCK_K):
        tl.store(p_ids + start + lane, -1, start + lane < K)
