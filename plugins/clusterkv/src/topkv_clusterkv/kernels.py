"""ClusterKV's decode step in Triton, beside ``reference.py``.

Names: ``p_`` pointers, ``s_`` strides in elements. A lane is ``row * KV_HEADS + head``; its
pools are those of ``slot * KV_HEADS + head``, addressed in 64 bit. Nothing is sorted: clusters
above a threshold are taken whole, and the threshold follows from the sizes bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_clusterkv.store import State

STATE = tl.constexpr(len(State))
WATERMARK = tl.constexpr(int(State.WATERMARK))
BUILT = tl.constexpr(int(State.BUILT))
CLUSTERS = tl.constexpr(int(State.CLUSTERS))


@triton.jit
def update_kernel(
    p_k,
    p_keys,
    p_state,
    p_slots,
    p_lengths,
    p_appended,
    s_k_row,
    s_k_head,
    KV_HEADS: tl.constexpr,
    PENDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row, kv-head): keep the new key until it is clustered."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    d = tl.arange(0, BLOCK_D)
    key = tl.load(p_k + row * s_k_row + head * s_k_head + d, d < D, other=0)
    p_keys += ((slot * KV_HEADS + head) * PENDING + newest % PENDING) * D
    tl.store(p_keys + d, key, d < D)
    if head == 0:
        p_watermark = p_state + slot * STATE + WATERMARK
        tl.store(p_watermark, tl.minimum(tl.load(p_watermark), newest))


@triton.jit
def _reach(p_state, slot, length, sinks):
    """Sinks, end of the clustered tokens, and newest token of a row, as ``reference.Reach``."""
    limit = tl.maximum(length - 1, 0)
    first = tl.minimum(limit, sinks)
    watermark = tl.load(p_state + slot * STATE + WATERMARK)
    closed = tl.maximum(tl.minimum(watermark, limit), first)
    return first, closed, limit


@triton.jit
def score_kernel(
    p_q,
    p_centroids,
    p_ends,
    p_state,
    p_slots,
    p_raw,
    p_peak,
    p_mass,
    max_clusters,
    blocks,
    logit_scale,
    s_q_row,
    s_q_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TILE_C: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (lane, block of clusters): scaled ``<q, mu>`` of the lane's query heads, and the
    maximum and exponential sum of the block over clusters that hold tokens.

    ``FP32`` multiplies in fp32: for fp32 keys, and for the interpreter.
    """
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = lane // KV_HEADS
    head = lane % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    clusters = tl.load(p_state + slot * STATE + CLUSTERS)
    if block * TILES * TILE_C >= clusters:
        return
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    in_d = d < D
    in_g = g < GROUP
    p_q += row * s_q_row + head * GROUP * s_q_head
    in_q = in_g[None, :] & in_d[:, None]
    q = tl.load(p_q + g.to(tl.int64)[None, :] * s_q_head + d[:, None], in_q, other=0.0)
    if FP32:
        q = q.to(tl.float32)
    at = (slot * KV_HEADS + head) * max_clusters
    p_raw += lane * GROUP * max_clusters
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        c = (block * TILES + tile) * TILE_C + tl.arange(0, TILE_C)
        in_c = c < clusters
        p_tile = p_centroids + (at + c)[:, None] * D + d[None, :]
        mu = tl.load(p_tile, in_c[:, None] & in_d[None, :], other=0.0).to(q.dtype)
        end = tl.load(p_ends + at + c, in_c, other=0)
        before = tl.load(p_ends + at + c - 1, in_c & (c > 0), other=0)
        scores = tl.dot(mu, q, input_precision="ieee") * logit_scale
        p_out = p_raw + g[None, :] * max_clusters + c[:, None]
        tl.store(p_out, scores, in_c[:, None] & in_g[None, :])
        scores = tl.where((end > before)[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(peak - base) + tl.sum(tl.exp(scores - base[None, :]), 0)
        peak = higher
    first = lane * GROUP + g
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)


@triton.jit
def _below(p_members, start, end, closed, STEPS: tl.constexpr):
    """Members below ``closed`` among the ascending ``members[start : end]`` of each cluster."""
    low = start
    high = end
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        up = open_ & (tl.load(p_members + middle, open_, other=0) < closed)
        low = tl.where(up, middle + 1, low)
        high = tl.where(open_ & (up == 0), middle, high)
    return low - start


@triton.jit
def _log_mean_softmax(
    p_raw,
    p_peak,
    p_mass,
    c,
    inside,
    used,
    max_clusters,
    blocks,
    GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """``reference.lane_scores`` up to a constant, from the raw scores and sums of the blocks."""
    score = tl.load(p_raw + c, inside, other=0.0)
    if GROUP > 1:
        p = tl.arange(0, BLOCK_P)
        for g in tl.static_range(GROUP):
            peaks = tl.load(p_peak + g * blocks + p, p < used, other=float("-inf"))
            masses = tl.load(p_mass + g * blocks + p, p < used, other=0.0)
            peak = tl.max(peaks, 0)
            total = tl.sum(masses * tl.exp(peaks - peak), 0)
            raw = tl.load(p_raw + g * max_clusters + c, inside, other=0.0)
            part = raw - (peak + tl.log(total))
            if g == 0:
                score = part
            else:
                high = tl.maximum(score, part)
                score = high + tl.log(1.0 + tl.exp(tl.minimum(score, part) - high))
    return score


@triton.jit
def _keys(score, valid):
    """uint32 of the order of finite scores; 0, which no score maps to, where not valid."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    keys = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(valid, keys, 0)


@triton.jit
def take_kernel(
    p_raw,
    p_peak,
    p_mass,
    p_ends,
    p_members,
    p_state,
    p_slots,
    p_lengths,
    p_upto,
    max_clusters,
    max_tokens,
    blocks,
    K,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program (lane): how many members of each cluster are selected, as prefix sums ``upto``."""
    lane = tl.program_id(0).to(tl.int64)
    head = lane % KV_HEADS
    row = lane // KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    first, closed, limit = _reach(p_state, slot, tl.load(p_lengths + row), sinks)
    built = tl.load(p_state + slot * STATE + BUILT)
    clusters = tl.load(p_state + slot * STATE + CLUSTERS)
    if clusters == 0:
        return
    room = tl.maximum(K - (first + limit - closed), 0)
    c = tl.arange(0, BLOCK_C)
    inside = c < clusters
    at = slot * KV_HEADS + head
    p_ends += at * max_clusters
    end = tl.load(p_ends + c, inside, other=0)
    start = tl.load(p_ends + c - 1, inside & (c > 0), other=0)
    size = end - start
    if closed < built:
        size = _below(p_members + at * max_tokens, start, end, closed, STEPS)
    score = _log_mean_softmax(
        p_raw + lane * GROUP * max_clusters,
        p_peak + lane * GROUP * blocks,
        p_mass + lane * GROUP * blocks,
        c,
        inside,
        (clusters + BLOCK - 1) // BLOCK,
        max_clusters,
        blocks,
        GROUP,
        BLOCK_P,
    )
    keys = _keys(score, inside & (size > 0))
    # Clusters and their members in one sum: fewer than 2**31 each.
    pair = size.to(tl.int64) + tl.where(size > 0, 1 << 32, 0).to(tl.int64)
    reached = tl.sum(pair, 0)
    want = tl.minimum(room, (reached & 0xFFFFFFFF).to(tl.int32))
    above_pair = reached - reached
    prefix = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1 << 31, tl.uint32)
    # Until the clusters that reach the prefix fill the budget, or one of them has to be cut.
    while (bit > 0) & ((reached & 0xFFFFFFFF) != want) & (((reached - above_pair) >> 32) != 1):
        part = tl.sum(tl.where(keys >= prefix + bit, pair, 0), 0)
        enough = (part & 0xFFFFFFFF) >= want
        reached = tl.where(enough, part, reached)
        above_pair = tl.where(enough, above_pair, part)
        prefix = tl.where(enough, prefix + bit, prefix)
        bit = bit >> 1
    valid = (keys >= prefix) & (keys > 0)
    prefix = tl.min(tl.where(valid, keys, 0xFFFFFFFF).to(tl.uint32), 0)
    above = keys > prefix
    equal = tl.where(keys == prefix, size, 0)
    left = want - tl.sum(tl.where(above, size, 0), 0)
    cut = tl.minimum(tl.maximum(left - (tl.cumsum(equal, 0) - equal), 0), equal)
    upto = tl.cumsum(tl.where(above, size, cut), 0)
    tl.store(p_upto + lane * max_clusters + c, upto, inside)


@triton.jit
def expand_kernel(
    p_upto,
    p_ends,
    p_members,
    p_state,
    p_slots,
    p_lengths,
    p_ids,
    s_ids,
    max_clusters,
    max_tokens,
    K,
    sinks,
    KV_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program (lane, block of ids): forced tokens, newest first, then the members taken."""
    lane = tl.program_id(0).to(tl.int64)
    head = lane % KV_HEADS
    row = lane // KV_HEADS
    j = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    p_ids += lane * s_ids
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        tl.store(p_ids + j, -1, j < K)
        return
    first, closed, limit = _reach(p_state, slot, tl.load(p_lengths + row), sinks)
    forced = first + limit - closed
    at = slot * KV_HEADS + head
    p_upto += lane * max_clusters
    p_ends += at * max_clusters
    clusters = tl.load(p_state + slot * STATE + CLUSTERS)
    nth = j - forced
    valid = (nth >= 0) & (j < limit) & (j < K)
    low = tl.zeros([BLOCK_K], tl.int32)
    high = low + clusters
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = valid & (low < high)
        up = open_ & (tl.load(p_upto + middle, open_, other=0) <= nth)
        low = tl.where(up, middle + 1, low)
        high = tl.where(open_ & (up == 0), middle, high)
    some = valid & (low > 0)
    before = tl.load(p_upto + low - 1, some, other=0)
    start = tl.load(p_ends + low - 1, some, other=0)
    chosen = tl.load(p_members + at * max_tokens + start + nth - before, valid, other=-1)
    newest = tl.where(j < limit - closed, limit - 1 - j, forced - 1 - j)
    ids = tl.where(nth < 0, newest, chosen)
    tl.store(p_ids + j, tl.where(j < limit, ids, -1), j < K)
