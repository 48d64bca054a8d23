"""Flatness of lanes, and what flat ones keep, in Triton, beside ``stage.HeadSparsity.refine``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
Places are those of the candidates, then those of the sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_head_sparsity import reference

RUN = tl.constexpr(reference.RUN)
SAMPLE = tl.constexpr(reference.SAMPLE)
LEVELS = tl.constexpr(reference.LEVELS)


@triton.jit
def _units(p_lane, place, candidates, closed, BLOCK: tl.constexpr):
    """Units at ``place [n]``, -1 where there is none: candidates, and those of the sample that are
    no candidates."""
    unit = tl.load(p_lane + place, place < candidates, other=-1)
    nth = place - candidates
    size = tl.minimum(closed, SAMPLE)
    other = (2 * nth + 1) * closed // tl.maximum(2 * size, 1)
    sampled = (nth >= 0) & (nth < size)
    offered = tl.zeros_like(place)
    if tl.max(place, 0) >= candidates:
        for start in range(0, candidates, BLOCK):
            c = start + tl.arange(0, BLOCK)
            ids = tl.load(p_lane + c, c < candidates, other=-1)
            same = (other[:, None] == ids[None, :]).to(tl.int32)
            offered = tl.maximum(offered, tl.max(same, 1))
    return tl.where(sampled & (offered == 0), other, unit)


@triton.jit
def worth_kernel(
    p_q,
    p_codes,
    p_scale,
    p_candidates,
    p_slots,
    p_lengths,
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
    UNITS_PER_PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, block of places): what units are worth to the query heads of a
    kv-head, the log-sum-exp of the estimated logits of their runs; -inf where there is no unit.

    ``FP32`` multiplies in fp32, for fp32 queries and for the interpreter, which has no bfloat16
    product.
    """
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0) // UNIT
    place = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    p_lane = p_candidates + pair // HEADS_PER_LANE * s_lane
    unit = _units(p_lane, place, candidates, closed, BLOCK)
    there = unit >= 0
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE, there, other=0)
    at = (page.to(tl.int64) * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    r = tl.arange(0, BLOCK_R)[None, :]
    in_run = tl.reshape(there[:, None] & (r < RUNS), [BLOCK_P * BLOCK_R])
    at = tl.reshape(at[:, None] * RUNS + r, [BLOCK_P * BLOCK_R])
    j = tl.arange(0, BLOCK_W)
    g = tl.arange(0, BLOCK_G)
    in_g = g < GROUP
    p_heads = p_q + row * s_q_row + (head * GROUP + g)[None, :] * s_q_head + j[:, None]
    low = tl.load(p_heads, in_g[None, :] & (j < WIDTH)[:, None], other=0.0)
    high = tl.load(p_heads + WIDTH, in_g[None, :] & (j < D - WIDTH)[:, None], other=0.0)
    if FP32:
        low, high = low.to(tl.float32), high.to(tl.float32)
    in_tile = in_run[:, None] & (j < WIDTH)[None, :]
    codes = tl.load(p_codes + at[:, None] * WIDTH + j[None, :], in_tile, other=0).to(tl.int32)
    middle = LEVELS + 1
    products = tl.dot(((codes & 15) - middle).to(low.dtype), low, input_precision="ieee")
    second = ((codes >> 4) - middle).to(low.dtype)
    products = tl.dot(second, high, acc=products, input_precision="ieee")
    scale = tl.load(p_scale + at, in_run, other=0.0) * logit_scale
    logits = tl.reshape(products * scale[:, None], [BLOCK_P, BLOCK_R, BLOCK_G])
    count = tl.minimum(tl.maximum(UNIT - r * RUN, 1), RUN).to(tl.float32)
    logits += tl.log(count)[:, :, None]
    logits = tl.where((r < RUNS)[:, :, None], logits, float("-inf"))
    peak = tl.max(logits, 1)
    worth = peak + tl.log(tl.sum(tl.exp(logits - peak[:, None, :]), 1))
    worth = tl.where(there[:, None], worth, float("-inf"))
    places = candidates + SAMPLE
    p_out = p_worth + (pair * GROUP + g)[None, :] * places + place[:, None]
    tl.store(p_out, worth, (place < places)[:, None] & in_g[None, :])


@triton.jit
def _tile(p_worth, place, places, end, HEADS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Worth ``[n, BLOCK_G]`` at places below ``end``, -inf elsewhere."""
    g = tl.arange(0, BLOCK_G)
    inside = (place < end)[:, None] & (g < HEADS)[None, :]
    p_in = p_worth + g.to(tl.int64)[None, :] * places + place[:, None]
    return tl.load(p_in, inside, other=float("-inf"))


@triton.jit
def _weigh(
    p_worth, candidates, closed, HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr
):
    """The least flatness of the heads of a lane, and ``log Z`` of each: ``reference.weigh``."""
    places = candidates + SAMPLE
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    known = tl.zeros([BLOCK], tl.int32)
    others = tl.zeros([BLOCK], tl.int32)
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        worth = _tile(p_worth, place, places, places, HEADS, BLOCK_G)
        there = (tl.max(worth, 1) > float("-inf")).to(tl.int32)
        known += tl.where(place < candidates, there, 0)
        others += tl.where(place < candidates, 0, there)
        peak = tl.maximum(peak, tl.max(worth, 0))
    each = (closed - tl.sum(known, 0)).to(tl.float32) / tl.maximum(tl.sum(others, 0), 1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)  # of columns behind the heads
    whole = tl.zeros([BLOCK_G], tl.float32)
    moment = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        worth = _tile(p_worth, place, places, places, HEADS, BLOCK_G)
        below = tl.where(worth > float("-inf"), worth - peak[None, :], -1e30)
        mass = tl.exp(below) * tl.where(place < candidates, 1.0, each)[:, None]
        whole += tl.sum(mass, 0)
        moment += tl.sum(mass * below, 0)
    real = tl.arange(0, BLOCK_G) < HEADS
    whole = tl.where(real, whole, 1.0)
    entropy = tl.log(whole) - moment / whole
    entropy = tl.min(tl.where(real, entropy, float("inf")), 0)
    return entropy / tl.log(closed.to(tl.float32)), peak + tl.log(whole)


@triton.jit
def drop_kernel(
    p_worth,
    p_candidates,
    p_ids,
    p_slots,
    p_lengths,
    candidates,
    select,
    few,
    threshold,
    s_lane,
    s_ids,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Program (lane, ``OWN`` places of ids): what is kept of the candidates at these places.

    Each program weighs the whole lane, which is little. A candidate of a flat lane is kept if
    fewer than ``few`` come before it: counting needs no sort, and any number may be offered.
    """
    lane = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * OWN + tl.arange(0, OWN)
    p_lane = p_candidates + lane * s_lane
    p_worth += lane * HEADS * (candidates + SAMPLE)
    unit = tl.load(p_lane + own, own < candidates, other=-1)
    keep = unit >= 0
    closed = tl.maximum(tl.load(p_lengths + lane // LANES) - 1, 0) // UNIT
    if (tl.load(p_slots + lane // LANES) >= 0) & (closed > select):
        flatness, whole = _weigh(p_worth, candidates, closed, HEADS, BLOCK, BLOCK_G)
        if flatness > threshold:
            places = candidates + SAMPLE
            worth = _tile(p_worth, own, places, candidates, HEADS, BLOCK_G)
            mine = tl.max(worth - whole[None, :], 1)
            before = tl.zeros([OWN], tl.int32)
            for start in range(0, candidates, BLOCK):
                c = start + tl.arange(0, BLOCK)
                ids = tl.load(p_lane + c, c < candidates, other=-1)
                others = _tile(p_worth, c, places, candidates, HEADS, BLOCK_G)
                share = tl.max(others - whole[None, :], 1)[None, :]
                first = (share == mine[:, None]) & (ids[None, :] < unit[:, None])
                first = (first | (share > mine[:, None])) & (ids >= 0)[None, :]
                before += tl.sum(first.to(tl.int32), 1)
            keep = keep & (before < few)
    tl.store(p_ids + lane * s_ids + own, tl.where(keep, unit, -1), own < select)
