"""Kernels that weigh and prune candidates, in Triton, beside ``stage.TopP.refine``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.outliers_kernels import products as outliers


@triton.jit
def worth_kernel(
    p_q,
    p_codes,
    p_meta,
    p_words,
    p_candidates,
    p_slots,
    p_appended,
    p_pages,
    p_worth,
    candidates,
    max_pages,
    logit_scale,
    s_q_row,
    s_q_query,
    s_q_head,
    s_lane,
    padded,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of candidates): write what candidates are worth to the query
    heads of a kv-head, the log-sum-exp of the estimated logits of their tokens. The ``GROUP``
    heads are those of all QUERIES of the row; to those of padding nothing is worth anything.

    ``FP32`` multiplies in fp32, for fp32 queries and for the interpreter, which has no bfloat16
    product.
    """
    pair = tl.program_id(0).to(tl.int64)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    nth = tl.arange(0, BLOCK_C * BLOCK_U)
    c = tl.program_id(1) * BLOCK_C + nth // BLOCK_U
    p_lane = p_candidates + pair // HEADS_PER_LANE * s_lane
    unit = tl.load(p_lane + c, c < candidates, other=-1)
    in_t = (unit >= 0) & (nth % BLOCK_U < UNIT)
    token = unit * UNIT + nth % BLOCK_U
    page = tl.load(p_pages + slot * max_pages + token // PAGE, in_t, other=0).to(tl.int64)
    at = (page * PAGE + token % PAGE) * KV_HEADS + head
    j = tl.arange(0, BLOCK_W)
    g = tl.arange(0, BLOCK_G)
    in_g = g < GROUP
    WIDTH: tl.constexpr = (D + 1) // 2
    EACH: tl.constexpr = GROUP // QUERIES
    p_heads = p_q + row * s_q_row + (head * EACH + g.to(tl.int64)) * s_q_head
    if QUERIES > 1:
        in_g &= g // EACH < tl.maximum(tl.load(p_appended + row), 1)
        p_heads += (g // EACH).to(tl.int64) * (s_q_query - EACH * s_q_head)
    p_even = p_heads[None, :] + 2 * j[:, None]
    q_low = tl.load(p_even, in_g[None, :] & (2 * j < D)[:, None], other=0.0)
    q_high = tl.load(p_even + 1, in_g[None, :] & (2 * j + 1 < D)[:, None], other=0.0)
    if FP32:
        q_low = q_low.to(tl.float32)
        q_high = q_high.to(tl.float32)
    in_tile = in_t[:, None] & (j < WIDTH)[None, :]
    codes = tl.load(p_codes + at[:, None] * WIDTH + j[None, :], in_tile, other=0)
    products = tl.dot((codes & 15).to(q_low.dtype), q_low, input_precision="ieee")
    products = tl.dot((codes >> 4).to(q_low.dtype), q_high, acc=products, input_precision="ieee")
    scale = tl.load(p_meta + at * 2, in_t, other=0.0).to(tl.float32)
    zero = tl.load(p_meta + at * 2 + 1, in_t, other=0.0).to(tl.float32)
    summed = tl.sum(q_low.to(tl.float32), 0) + tl.sum(q_high.to(tl.float32), 0)
    logits = products * tl.abs(scale)[:, None] + zero[:, None] * summed[None, :]
    left = in_t & (scale.to(tl.int32, bitcast=True) < 0)  # -0.0 among them
    if tl.max(left.to(tl.int32), 0) != 0:
        words = outliers(p_words + at * PAIRS, left, p_heads, in_g, D, PAIRS)
        logits += tl.trans(words)
    logits = logits * logit_scale
    logits = tl.where(in_t[:, None], logits, float("-inf"))
    logits = tl.reshape(logits, [BLOCK_C, BLOCK_U, BLOCK_G])
    peak = tl.max(logits, 1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(tl.exp(logits - peak[:, None, :]), 1)
    worth = peak + tl.log(tl.where(total > 0, total, 1.0))  # of no candidate it is not read
    if QUERIES > 1:
        worth = tl.where(in_g[None, :], worth, float("-inf"))
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_out = p_worth + (pair * GROUP + g)[None, :] * padded + c[:, None]
    tl.store(p_out, worth, (c < candidates)[:, None] & (g < GROUP)[None, :])


@triton.jit
def _places(p_weight, c, padded, HEADS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Pointers ``[C, G]`` to the heads' weights of candidates ``c``, and which of these exist."""
    g = tl.arange(0, BLOCK_G)
    places = p_weight + g.to(tl.int64)[None, :] * padded + c[:, None]
    return places, (c < padded)[:, None] & (g < HEADS)[None, :]


@triton.jit
def _worth(p_worth, p_lane, c, candidates, padded, HEADS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Worth of candidates ``c``, ``[C, G]``, -inf where there is no unit."""
    unit = tl.load(p_lane + c, c < candidates, other=-1)
    places, inside = _places(p_worth, c, padded, HEADS, BLOCK_G)
    return tl.load(places, inside & (unit >= 0)[:, None], other=float("-inf"))


@triton.jit
def _rank(
    p_worth,
    p_rank,
    p_lane,
    candidates,
    padded,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write what candidates weigh over what they are worth, and their ranks; return the whole
    weight ``[G]`` of each head.

    Ranks are fp32 numbers of 0 to 1, whose bits are integers in their order, below 2**30; -1 where
    there is no unit, and where rows are padded.
    """
    block = tl.arange(0, BLOCK_C)
    highest = tl.full([BLOCK_C, BLOCK_G], float("-inf"), tl.float32)
    for start in range(0, candidates, BLOCK_C):
        worth = _worth(p_worth, p_lane, start + block, candidates, padded, HEADS, BLOCK_G)
        highest = tl.maximum(highest, worth)
    peak = tl.max(highest, 0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    weights = tl.zeros([BLOCK_C, BLOCK_G], tl.float32)
    for start in range(0, padded, BLOCK_C):
        worth = _worth(p_worth, p_lane, start + block, candidates, padded, HEADS, BLOCK_G)
        places, inside = _places(p_worth, start + block, padded, HEADS, BLOCK_G)
        weight = tl.exp(worth - peak[None, :])
        tl.store(places, weight, inside)
        weights += weight
    whole = tl.sum(weights, 0)
    tl.debug_barrier()  # what other threads wrote is read
    for start in range(0, padded, BLOCK_C):
        c = start + block
        places, inside = _places(p_worth, c, padded, HEADS, BLOCK_G)
        share = tl.load(places, inside, other=0.0) / tl.where(whole > 0, whole, 1.0)[None, :]
        unit = tl.load(p_lane + c, c < candidates, other=-1)
        rank = tl.where(unit >= 0, tl.max(share, 1).to(tl.int32, bitcast=True), -1)
        tl.store(p_rank + c, rank, c < padded)
    tl.debug_barrier()
    return whole


@triton.jit
def _ranked(p_weight, p_rank, c, padded, HEADS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Ranks ``[C]`` of candidates ``c``, and what they weigh ``[C, G]``."""
    places, inside = _places(p_weight, c, padded, HEADS, BLOCK_G)
    return tl.load(p_rank + c, c < padded, other=-1), tl.load(places, inside, other=0.0)


@triton.jit
def _kept(p_lane, c, candidates, rank, rank_bound, unit_bound, TIES: tl.constexpr):
    """True for candidates ``c`` whose rank is above ``rank_bound``, which is 0 or more, or, with
    ``TIES``, equal to it while their unit is below ``unit_bound``."""
    keep = rank > rank_bound
    if TIES:
        unit = tl.load(p_lane + c, c < candidates, other=-1)
        keep |= (rank == rank_bound) & (unit < unit_bound)
    return keep


@triton.jit
def _enough(
    p_weight,
    p_rank,
    p_lane,
    candidates,
    padded,
    need,
    most,
    rank,
    weight,
    rank_bound,
    unit_bound,
    TIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Return True if the candidates within these bounds hold every head's share, or are ``most``.

    The first block is given, others are read. Sums are added up thread by thread, and of all
    threads once: that is what takes time.
    """
    c = tl.arange(0, BLOCK_C)
    keep = _kept(p_lane, c, candidates, rank, rank_bound, unit_bound, TIES)
    mass = tl.where(keep[:, None], weight, 0.0)
    count = keep.to(tl.int32)
    for start in range(BLOCK_C, padded, BLOCK_C):
        rank, weight = _ranked(p_weight, p_rank, start + c, padded, HEADS, BLOCK_G)
        keep = _kept(p_lane, start + c, candidates, rank, rank_bound, unit_bound, TIES)
        mass += tl.where(keep[:, None], weight, 0.0)
        count += keep.to(tl.int32)
    lacking = tl.sum((tl.sum(mass, 0) < need).to(tl.int32), 0)
    return (lacking == 0) | (tl.sum(count, 0) >= most)


@triton.jit
def prune_kernel(
    p_worth,
    p_rank,
    p_candidates,
    p_ids,
    candidates,
    padded,
    most,
    p,
    s_lane,
    s_ids,
    HEADS: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (lane): the candidates that are kept, by two searches bit by bit.

    The first finds the highest rank at which all candidates of it and above are enough, the second
    how many of those of just that rank are needed, from the lowest unit on; of one there is
    nothing to search. Each step looks at all candidates: the first block stays in registers, and
    others are read, so that there may be any number. ``WHOLE``: p is 1. ``IN_PLACE``: there are
    places for all of them. Writes weights over ``p_worth``, and ranks, in rows of ``padded``.
    """
    lane = tl.program_id(0).to(tl.int64)
    p_worth += lane * HEADS * padded
    p_rank += lane * padded
    p_lane = p_candidates + lane * s_lane
    p_ids += lane * s_ids
    block = tl.arange(0, BLOCK_C)
    need = p * _rank(p_worth, p_rank, p_lane, candidates, padded, HEADS, BLOCK_C, BLOCK_G)
    if WHOLE:
        need = tl.full([BLOCK_G], float("inf"), tl.float32)
    ranks, weight = _ranked(p_worth, p_rank, block, padded, HEADS, BLOCK_G)
    rank = 0
    bit = 1 << 29
    for _ in range(30):
        higher = rank | bit
        enough = _enough(p_worth, p_rank, p_lane, candidates, padded, need, most, ranks,
                         weight, higher - 1, 0, False, HEADS, BLOCK_C, BLOCK_G)  # fmt: skip
        rank = tl.where(enough, higher, rank)
        bit = bit >> 1
    alike = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, padded, BLOCK_C):
        found = tl.load(p_rank + start + block, start + block < padded, other=-1)
        alike += (found == rank).to(tl.int32)
    last = (1 << UNIT_BITS) - 1
    if tl.sum(alike, 0) > 1:
        last = 0
        bit = 1 << (UNIT_BITS - 1)
        for _ in range(UNIT_BITS):
            later = last | bit
            enough = _enough(p_worth, p_rank, p_lane, candidates, padded, need, most, ranks,
                             weight, rank, later, True, HEADS, BLOCK_C, BLOCK_G)  # fmt: skip
            last = tl.where(enough, last, later)
            bit = bit >> 1
    done = 0
    for start in range(0, tl.maximum(candidates, most), BLOCK_C):
        at = start + block
        unit = tl.load(p_lane + at, at < candidates, other=-1)
        found = tl.load(p_rank + at, at < candidates, other=-1)
        keep = _kept(p_lane, at, candidates, found, rank, last + 1, True)
        if not IN_PLACE:
            at = tl.where(keep, done + tl.cumsum(keep.to(tl.int32), 0) - 1, most)
            done += tl.sum(keep.to(tl.int32), 0)
        tl.store(p_ids + at, tl.where(keep, unit, -1), at < most)
    if not IN_PLACE:
        for start in range(0, most, BLOCK_C):
            at = start + block
            tl.store(p_ids + at, -1, (at >= done) & (at < most))
