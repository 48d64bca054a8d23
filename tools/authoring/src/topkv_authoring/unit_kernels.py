"""Kernels around an algorithm's own device functions: page look-up, ring, masks and ranking once.

``topkv_authoring.units`` launches them. An author writes two functions, each beside its torch:

    represent(k, v, valid, tokens, pools, at, OPTIONS, D)
        stores what is kept of the unit whose rows of the pools are ``at``. ``k`` and ``v`` are
        fp32 ``[BLOCK_T, BLOCK_D]`` keys and values, 0 where ``valid`` is False; ``v`` are the keys
        again unless the class says that it keeps something of values. ``tokens`` of them are
        there. A class with ``unit_parts`` gets one part of a unit at a time, of which maybe no
        token is there; ``at`` then counts parts of heads.

    score(scores, q, pools, at, d, inside, OPTIONS, D)
        adds to ``scores [TILE_U, BLOCK_G]`` what units are worth to query heads by the channels
        ``d [BLOCK_D]``. ``q [BLOCK_D, BLOCK_G]``; ``at [TILE_U]`` rows of the pools; ``inside
        [TILE_U, BLOCK_D]`` is where a channel of a unit may be read. Called once for all channels,
        or, of many, once for every ``BLOCK_D`` of them.

and, where they want, two more:

    prepare(q, d, OPTIONS, D)
        returns what ``score`` gets for ``q`` and ``d``, and factors of the scores. Once for each
        query, before the tiles: ``q [BLOCK_D, BLOCK_G]`` has all channels ``d [BLOCK_D]`` of all
        heads, 0 in padding. It may return fewer rows, a power of two from 16 on, of other
        channels, in the dtype of ``q``; a channel of ``D`` or more is not read. Factors are fp32
        ``[BLOCK_G]``, one for each query head.

    finish(scores, pools, at, inside, OPTIONS, D)
        returns the scores once all channels are in; ``inside [TILE_U]``.

``at`` counts heads of units: the first dimension of a representation's shape is that of the
kv-heads, and the row of a pool begins at ``at`` times the elements of one of them. ``pools`` is a
tuple of pointers in the order of ``representations``; ``language.store`` writes to them. Those of
bfloat16 are int16 to ``represent``: their bits, since a cast rounds in another way in the
interpreter. ``OPTIONS`` are the numbers of the class's ``options``. ``q`` has the dtype of the
model on a GPU, and is fp32 in the interpreter. ``finish`` comes before the scale of the model.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.lane_scores_kernels import fold


@triton.jit
def places(p_row, units, inside, UNITS_PER_PAGE: tl.constexpr):
    """Host ids of logical ``units`` of the request whose pages are at ``p_row``; int64."""
    page = tl.load(p_row + units // UNITS_PER_PAGE, inside, other=0)
    return page.to(tl.int64) * UNITS_PER_PAGE + units % UNITS_PER_PAGE


@triton.jit
def kept(scores, pools, at, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``finish`` of scores that are complete."""
    return scores


@triton.jit
def _rows(p, valid, AS_BITS: tl.constexpr):
    """fp32 keys or values; bfloat16 is read as its bits, which keeps subnormals everywhere."""
    raw = tl.load(p, valid, other=0)
    if AS_BITS:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def _represent(
    p_k,
    p_v,
    s_k,
    s_v,
    tokens,
    pools,
    at,
    REPRESENT: tl.constexpr,
    OPTIONS: tl.constexpr,
    VALUES: tl.constexpr,
    AS_BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Represent the first ``tokens`` rows at ``p_k`` and ``p_v``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    valid = (t < tokens) & (d < D)
    k = _rows(p_k + t.to(tl.int64) * s_k + d, valid, AS_BITS)
    v = k
    if VALUES:
        v = _rows(p_v + t.to(tl.int64) * s_v + d, valid, AS_BITS)
    REPRESENT(k, v, valid, tokens, pools, at, OPTIONS, D)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_v,
    pools,
    p_pages,
    first_unit,
    tokens,
    s_k,
    s_k_head,
    s_v,
    s_v_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    REPRESENT: tl.constexpr,
    OPTIONS: tl.constexpr,
    VALUES: tl.constexpr,
    AS_BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Represent a chunk. Program (unit, kv-head, part); ``p_pages`` of the request."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    SPAN: tl.constexpr = UNIT // PARTS
    at = places(p_pages, first_unit + nth, nth >= 0, UNITS_PER_PAGE) * KV_HEADS + head
    first = nth * UNIT + part * SPAN
    _represent(
        *(p_k + first * s_k + head * s_k_head, p_v + first * s_v + head * s_v_head),
        *(s_k, s_v, tl.minimum(tokens - first, SPAN), pools, at * PARTS + part),
        *(REPRESENT, OPTIONS, VALUES, AS_BITS, D, BLOCK_T, BLOCK_D),
    )


@triton.jit
def update_kernel(
    p_k,
    p_v,
    pools,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    s_slot,
    s_lane,
    s_unit,
    s_head,
    s_token,
    HEADS_PER_LANE: tl.constexpr,
    T: tl.constexpr,
    TOUCHED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    REPRESENT: tl.constexpr,
    OPTIONS: tl.constexpr,
    VALUES: tl.constexpr,
    AS_BITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Represent anew each unit that a row's new tokens are in. Program (row x TOUCHED units,
    kv-head, part).

    The kernel reads the rings of keys and values, which have the same strides. For units of one
    token it reads the new rows instead: ``s_slot`` is their stride, ``s_unit`` that of their
    tokens."""
    row = (tl.program_id(0) // TOUCHED).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    SPAN: tl.constexpr = UNIT // PARTS
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    appended = tl.load(p_appended + row)
    if (slot < 0) | (newest < 0) | (appended == 0):
        return
    unit = newest // UNIT
    if TOUCHED > 1:
        nth = tl.program_id(0) % TOUCHED
        unit = (newest + 1 - appended) // UNIT + nth
        if unit > newest // UNIT:
            return
    at = places(p_pages + slot * max_pages, unit, newest >= 0, UNITS_PER_PAGE) * KV_HEADS + head
    if UNIT == 1:
        start = row * s_slot + head * s_head
        if TOUCHED > 1:
            start += nth * s_unit
    else:
        start = slot * s_slot + (head // HEADS_PER_LANE) * s_lane
        start += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
        start += (part * SPAN).to(tl.int64) * s_token
    tokens = tl.minimum(newest + 1 - unit * UNIT - part * SPAN, SPAN)
    _represent(
        *(p_k + start, p_v + start, s_token, s_token, tokens, pools, at * PARTS + part),
        *(REPRESENT, OPTIONS, VALUES, AS_BITS, D, BLOCK_T, BLOCK_D),
    )


@triton.jit
def score_kernel(
    p_q,
    pools,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    p_raw,
    p_peak,
    p_mass,
    max_pages,
    max_units,
    blocks,
    logit_scale,
    s_q_row,
    s_q_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    PREPARE: tl.constexpr,
    SCORE: tl.constexpr,
    FINISH: tl.constexpr,
    OPTIONS: tl.constexpr,
    D: tl.constexpr,
    TILE_U: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP32: tl.constexpr,
):
    """Write scaled scores, and the maximum and the exponential sum of each block of units.

    Program (row x kv-head x block of its query heads, block of units). A program pipelines
    ``TILES`` tiles. Queries stay in registers where ``BLOCK_D`` holds all channels; else they come
    with the pools, ``BLOCK_D`` channels at a time. The ``GROUP`` heads of a kv-head are those of
    all QUERIES of the row. ``FP32`` multiplies in fp32, for fp32 queries
    and for the interpreter, which has no bfloat16 product.
    """
    WIDE: tl.constexpr = BLOCK_D < D
    PARTS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    pair = (tl.program_id(0) // PARTS).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0) // UNIT
    if (slot < 0) | (block * TILES * TILE_U >= closed):
        return
    channels = tl.arange(0, BLOCK_D)
    g = tl.program_id(0) % PARTS * BLOCK_G + tl.arange(0, BLOCK_G)
    in_g = g < GROUP
    p_heads = p_q + row * s_q_row + (head * GROUP + g).to(tl.int64)[None, :] * s_q_head
    if not WIDE:
        in_q = in_g[None, :] & (channels < D)[:, None]
        q = tl.load(p_heads + channels[:, None], in_q, other=0.0)
        if FP32:
            q = q.to(tl.float32)
        if PREPARE is not None:
            q, channels, factors = PREPARE(q, channels, OPTIONS, D)
            logit_scale *= factors[None, :]
    first = pair * GROUP + g
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=1 if WIDE else STAGES):
        u = (block * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        in_u = u < closed
        at = places(p_pages + slot * max_pages, u, in_u, UNITS_PER_PAGE) * KV_HEADS + head
        scores = tl.zeros([TILE_U, BLOCK_G], tl.float32)
        if WIDE:
            for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                d = start + channels
                in_d = d < D
                q = tl.load(p_heads + d[:, None], in_g[None, :] & in_d[:, None], other=0.0)
                if FP32:
                    q = q.to(tl.float32)
                scores = SCORE(scores, q, pools, at, d, in_u[:, None] & in_d, OPTIONS, D)
        else:
            inside = in_u[:, None] & (channels < D)
            scores = SCORE(scores, q, pools, at, channels, inside, OPTIONS, D)
        scores = FINISH(scores, pools, at, in_u, OPTIONS, D) * logit_scale
        p_out = p_raw + first[None, :] * max_units + u[:, None]
        tl.store(p_out, scores, in_u[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_u)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
