"""The estimate in Triton, beside ``reference.logits`` and ``reference.add``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit. A
*share* is a number of units that one program takes: it leaves the maximum of their logits, the
sum of their weights and of their weighted values, and a second kernel adds the shares to what
was attended.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.language import store


@triton.jit
def write_summary(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.summary`` of a unit."""
    d = tl.arange(0, k.shape[1])
    mean = tl.sum(k, 0) / tokens
    store(pools[0] + at * (2 * D) + d, mean, d < D)
    store(pools[0] + at * (2 * D) + D + d, tl.sum(v, 0) / tokens, d < D)


@triton.jit
def _selected(p_ids, u, select, BLOCK_K: tl.constexpr):
    """True for units ``u [n]`` that are among the ``select`` ids of a lane."""
    held = tl.zeros_like(u)
    for first in range(0, select, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        ids = tl.load(p_ids + k, k < select, other=-1)
        held = tl.maximum(held, tl.max((ids[None, :] == u[:, None]).to(tl.int32), 1))
    return held > 0


@triton.jit
def weigh_kernel(
    p_q,
    p_means,
    p_ids,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    p_peak,
    p_mass,
    p_sum,
    max_pages,
    shares,
    select,
    logit_scale,
    log_unit,
    s_q_row,
    s_q_query,
    s_q_head,
    s_ids,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE_U: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, share): a running softmax over the units that were left out. The
    ``GROUP`` heads of a kv-head are those of all QUERIES of the row."""
    pair = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0) // UNIT
    if (slot < 0) | (share * TILES * TILE_U >= closed):
        return
    d, g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    in_d, in_g = d < D, g < GROUP
    EACH: tl.constexpr = GROUP // QUERIES
    p_heads = p_q + row * s_q_row + (head * EACH + g.to(tl.int64)) * s_q_head
    if QUERIES > 1:
        in_g &= g // EACH < new
        p_heads += (g // EACH).to(tl.int64) * (s_q_query - EACH * s_q_head)
    in_q = in_g[None, :] & in_d[:, None]
    q = tl.load(p_heads[None, :] + d[:, None], in_q, other=0.0)
    if FP32:
        q = q.to(tl.float32)
    lane = row * (KV_HEADS // HEADS_PER_LANE) + head // HEADS_PER_LANE
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        u = (share * TILES + tile) * TILE_U + tl.arange(0, TILE_U)
        page = tl.load(p_pages + slot * max_pages + u // UNITS_PER_PAGE, u < closed, other=0)
        at = (page.to(tl.int64) * UNITS_PER_PAGE + u % UNITS_PER_PAGE) * KV_HEADS + head
        left = (u < closed) & ~_selected(p_ids + lane * s_ids, u, select, BLOCK_K)
        there = left[:, None] & in_d[None, :]
        key = tl.load(p_means + at[:, None] * (2 * D) + d[None, :], there, other=0.0).to(q.dtype)
        logits = tl.dot(key, q, input_precision="ieee") * logit_scale + log_unit
        logits = tl.where(left[:, None], logits, float("-inf"))
        above = tl.maximum(peak, tl.max(logits, 0))
        floor = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp(logits - floor[None, :])
        kept = tl.exp(peak - floor)
        mass = mass * kept + tl.sum(weights, 0)
        value = tl.load(p_means + at[:, None] * (2 * D) + D + d[None, :], there, other=0.0)
        value = value.to(q.dtype)
        total = total * kept[:, None]
        total = tl.dot(tl.trans(weights).to(q.dtype), value, acc=total, input_precision="ieee")
        peak = above
    first = (pair * GROUP + g) * shares + share
    tl.store(p_peak + first, peak, in_g)
    tl.store(p_mass + first, mass, in_g)
    tl.store(p_sum + first[:, None] * D + d[None, :], total, in_g[:, None] & in_d[None, :])


@triton.jit
def add_kernel(
    p_slots,
    p_lengths,
    p_appended,
    p_peak,
    p_mass,
    p_sum,
    p_out,
    p_lse,
    shares,
    s_out_row,
    s_out_query,
    s_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    SHARE_UNITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row x query x query head): what was attended, and the shares, by their
    log-sum-exp."""
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // (QUERIES * HEADS), pair % HEADS
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
    closed = tl.maximum(tl.load(p_lengths + row) - new, 0) // UNIT
    used = (closed + SHARE_UNITS - 1) // SHARE_UNITS
    if (tl.load(p_slots + row) < 0) | (used == 0):
        return
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    first = pair * shares
    p_out += row * s_out_row + head * s_out_head
    if QUERIES > 1:
        query = pair // HEADS % QUERIES
        if query >= new:
            return
        EACH: tl.constexpr = GROUP // QUERIES
        within = head // EACH * GROUP + query * EACH + head % EACH
        first = (row * QUERIES * HEADS + within) * shares
        p_out += query * s_out_query
    peak = tl.load(p_lse + pair)
    mass = tl.where(peak == float("-inf"), 0.0, 1.0)
    p_row = p_out + d
    total = tl.load(p_row, in_d, other=0.0).to(tl.float32) * mass
    added = 0.0
    for share in range(used):
        at = first + share
        above = tl.load(p_peak + at)
        highest = tl.maximum(peak, above)
        floor = tl.where(highest == float("-inf"), 0.0, highest)
        kept, weight = tl.exp(peak - floor), tl.exp(above - floor)
        part = tl.load(p_mass + at) * weight
        mass = mass * kept + part
        added = tl.maximum(added, tl.load(p_mass + at))
        total = total * kept + tl.load(p_sum + at * D + d, in_d, other=0.0) * weight
        peak = highest
    if added > 0:  # a share in which all was attended has the mass 0
        tl.store(p_row, (total / mass).to(p_out.dtype.element_ty), in_d)
        tl.store(p_lse + pair, peak + tl.log(mass))
