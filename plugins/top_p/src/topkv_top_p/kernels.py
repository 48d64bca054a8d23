"""How candidates are weighed and pruned, in Triton, beside ``stage.TopP.refine``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def worth_kernel(
    p_q,
    p_codes,
    p_meta,
    p_candidates,
    p_slots,
    p_pages,
    p_worth,
    candidates,
    max_pages,
    logit_scale,
    s_q_row,
    s_q_head,
    s_lane,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of candidates): what candidates are worth to the query heads
    of a kv-head, the log-sum-exp of the estimated logits of their tokens.

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
    p_heads = (
        p_q + row * s_q_row + (head * GROUP + g.to(tl.int64))[None, :] * s_q_head + j[:, None]
    )
    q_low = tl.load(p_heads, in_g[None, :] & (j < WIDTH)[:, None], other=0.0)
    q_high = tl.load(p_heads + WIDTH, in_g[None, :] & (j < D - WIDTH)[:, None], other=0.0)
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
    logits = (products * scale[:, None] + zero[:, None] * summed[None, :]) * logit_scale
    logits = tl.where(in_t[:, None], logits, float("-inf"))
    logits = tl.reshape(logits, [BLOCK_C, BLOCK_U, BLOCK_G])
    peak = tl.max(logits, 1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(tl.exp(logits - peak[:, None, :]), 1)
    worth = peak + tl.log(tl.where(total > 0, total, 1.0))  # of no candidate it is not read
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_out = p_worth + (pair * GROUP + g)[None, :] * candidates + c[:, None]
    tl.store(p_out, worth, (c < candidates)[:, None] & in_g[None, :])


@triton.jit
def _tile(p_worth, p_lane, c, candidates, HEADS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Units ``[C]`` at places ``c``, -1 where there is none, and their worth ``[C, G]``."""
    g = tl.arange(0, BLOCK_G)
    unit = tl.load(p_lane + c, c < candidates, other=-1)
    inside = (unit >= 0)[:, None] & (g < HEADS)[None, :]
    p_in = p_worth + g.to(tl.int64)[None, :] * candidates + c[:, None]
    return unit, tl.load(p_in, inside, other=float("-inf"))


@triton.jit
def _kept(unit, weight, whole, rank_bound, unit_bound):
    """Which candidates rank above a bound, or at it and are lower units than another."""
    rank = tl.max(weight / tl.where(whole > 0, whole, 1.0)[None, :], 1)
    rank = tl.where(unit >= 0, rank.to(tl.int32, bitcast=True), -1)
    return (rank > rank_bound) | ((rank == rank_bound) & (unit >= 0) & (unit < unit_bound))


@triton.jit
def _enough(
    p_worth,
    p_lane,
    candidates,
    peak,
    whole,
    need,
    most,
    rank_bound,
    unit_bound,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Whether what is kept by these bounds has every head's share, or is as many as may be."""
    mass = tl.zeros([BLOCK_G], tl.float32)
    count = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, candidates, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        unit, worth = _tile(p_worth, p_lane, c, candidates, HEADS, BLOCK_G)
        weight = tl.exp(worth - peak[None, :])
        keep = _kept(unit, weight, whole, rank_bound, unit_bound)
        mass += tl.sum(tl.where(keep[:, None], weight, 0.0), 0)
        count += keep.to(tl.int32)
    lacking = tl.sum((mass < need).to(tl.int32), 0)
    return (lacking == 0) | (tl.sum(count, 0) >= most)


@triton.jit
def prune_kernel(
    p_worth,
    p_candidates,
    p_ids,
    candidates,
    most,
    p,
    s_lane,
    s_ids,
    HEADS: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    TOP_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (lane): the candidates that are kept, by two searches bit by bit.

    The first finds the highest rank at which all candidates of it and above are enough, the second
    how many of those of just that rank are needed, from the lowest unit on. Each step reads all
    candidates, a block at a time, so that there may be any number. ``WHOLE``: p is 1.
    ``IN_PLACE``: there are places for all of them.
    """
    lane = tl.program_id(0).to(tl.int64)
    p_worth += lane * HEADS * candidates
    p_lane = p_candidates + lane * s_lane
    block = tl.arange(0, BLOCK_C)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for start in range(0, candidates, BLOCK_C):
        unit, worth = _tile(p_worth, p_lane, start + block, candidates, HEADS, BLOCK_G)
        peak = tl.maximum(peak, tl.max(worth, 0))
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    whole = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, candidates, BLOCK_C):
        unit, worth = _tile(p_worth, p_lane, start + block, candidates, HEADS, BLOCK_G)
        whole += tl.sum(tl.exp(worth - peak[None, :]), 0)
    need = p * whole
    if WHOLE:
        need = tl.full([BLOCK_G], float("inf"), tl.float32)
    # Ranks are fp32 numbers of 0 to 1, whose bits are integers in their order, below 2**30.
    rank = 0
    bit = 1 << 29
    for _ in range(30):
        higher = rank | bit
        enough = _enough(p_worth, p_lane, candidates, peak, whole, need, most, higher - 1, 0,
                         HEADS, BLOCK_C, BLOCK_G)  # fmt: skip
        rank = tl.where(enough, higher, rank)
        bit = bit >> 1
    last = 0
    bit = TOP_UNIT
    for _ in range(UNIT_BITS):
        later = last | bit
        enough = _enough(p_worth, p_lane, candidates, peak, whole, need, most, rank, later,
                         HEADS, BLOCK_C, BLOCK_G)  # fmt: skip
        last = tl.where(enough, last, later)
        bit = bit >> 1
    done = 0
    for start in range(0, tl.maximum(candidates, most), BLOCK_C):
        unit, worth = _tile(p_worth, p_lane, start + block, candidates, HEADS, BLOCK_G)
        keep = _kept(unit, tl.exp(worth - peak[None, :]), whole, rank, last + 1)
        at = start + block
        if not IN_PLACE:
            at = tl.where(keep, done + tl.cumsum(keep.to(tl.int32), 0) - 1, most)
            done += tl.sum(keep.to(tl.int32), 0)
        tl.store(p_ids + lane * s_ids + at, tl.where(keep, unit, -1), at < most)
    if not IN_PLACE:
        for start in range(0, most, BLOCK_C):
            at = start + block
            tl.store(p_ids + lane * s_ids + at, -1, (at >= done) & (at < most))
