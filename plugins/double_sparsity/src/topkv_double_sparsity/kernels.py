"""How Double Sparsity selects, in Triton, beside ``reference.head_logits`` and ``lane_scores``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _query(
    p_q,
    p_channels,
    s_q_head,
    k,
    c,
    part,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Queries of ``HEADS`` kv-heads, ``[BLOCK_K, BLOCK_C]``, zero off the block diagonal.

    Row ``head * WIDTH + j`` stands for channel ``part + j`` of the label of a head.
    """
    head, j = k // WIDTH, k % WIDTH + part
    in_k = (head < HEADS) & (j < R)
    channel = tl.load(p_channels + head * R + j, in_k, other=0)
    mine = (head[:, None] == (c // GROUP)[None, :]) & in_k[:, None]
    return tl.load(p_q + c.to(tl.int64)[None, :] * s_q_head + channel[:, None], mine, other=0.0)


@triton.jit
def score_kernel(
    p_q,
    p_labels,
    p_meta,
    p_channels,
    p_slots,
    p_lengths,
    p_pages,
    p_raw,
    p_peak,
    p_mass,
    p_moment,
    max_pages,
    max_units,
    blocks,
    logit_scale,
    s_q_row,
    s_q_head,
    s_channels,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INT4: tl.constexpr,
    ENTROPY: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x ``HEADS`` kv-heads, block of tokens): scaled logits of the query heads, and
    the maximum, the exponential sum and, for ``ENTROPY``, the exponential sum times the logit.

    The labels of neighbouring heads lie side by side: one wide load takes ``HEADS`` of them, and
    one product with a block-diagonal matrix of queries scores them all. 4-bit codes are whole
    numbers, exact in every dtype; scale and zero are applied to the fp32 sums. ``FP32``
    multiplies in fp32, for fp32 queries and for the interpreter, which has no bfloat16 product.
    """
    bundle = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = bundle // (KV_HEADS // HEADS)
    first = bundle % (KV_HEADS // HEADS) * HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    start = block * (TILES * TILE)
    if (slot < 0) | (start >= closed):
        return
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_C)
    in_k = k < HEADS * WIDTH
    in_c = c < HEADS * GROUP
    p_q += row * s_q_row + first * GROUP * s_q_head
    p_channels += slot * s_channels + first * R
    q = _query(p_q, p_channels, s_q_head, k, c, 0, R, WIDTH, HEADS, GROUP)
    if FP32:
        q = q.to(tl.float32)
    if INT4:
        q_high = _query(p_q, p_channels, s_q_head, k, c, WIDTH, R, WIDTH, HEADS, GROUP)
        q_high = q_high.to(q.dtype)
        total = tl.sum(q.to(tl.float32), 0) + tl.sum(q_high.to(tl.float32), 0)
    out = row * (KV_HEADS * GROUP) + first * GROUP + c
    peak = tl.full([BLOCK_C], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_C], tl.float32)
    moment = tl.zeros([BLOCK_C], tl.float32)
    for tile in tl.range(0, tl.minimum(TILES, tl.cdiv(closed - start, TILE)), num_stages=STAGES):
        t = start + tile * TILE + tl.arange(0, TILE)
        in_t = t < closed
        page = tl.load(p_pages + slot * max_pages + t // PAGE, in_t, other=0)
        at = page.to(tl.int64) * PAGE + t % PAGE
        p_tile = p_labels + at[:, None] * (KV_HEADS * WIDTH) + first * WIDTH + k[None, :]
        label = tl.load(p_tile, in_t[:, None] & in_k[None, :], other=0)
        if INT4:
            scores = tl.dot((label & 15).to(q.dtype), q, input_precision="ieee")
            scores = tl.dot((label >> 4).to(q.dtype), q_high, acc=scores, input_precision="ieee")
            p_step = p_meta + (at[:, None] * KV_HEADS + first + (c // GROUP)[None, :]) * 2
            inside = in_t[:, None] & in_c[None, :]
            step = tl.load(p_step, inside, other=0.0).to(tl.float32)
            zero = tl.load(p_step + 1, inside, other=0.0).to(tl.float32)
            scores = scores * step + zero * total[None, :]
        else:
            scores = tl.dot(label.to(q.dtype), q, input_precision="ieee")
        scores = scores * logit_scale
        p_out = p_raw + out[None, :] * max_units + t[:, None]
        tl.store(p_out, scores, in_t[:, None] & in_c[None, :])
        masked = tl.where(in_t[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(masked, 0))
        shrink = tl.exp(peak - higher)
        weights = tl.exp(masked - higher[None, :])
        mass = mass * shrink + tl.sum(weights, 0)
        if ENTROPY:
            moment = moment * shrink + tl.sum(weights * scores, 0)
        peak = higher
    tl.store(p_peak + out * blocks + block, peak, in_c)
    tl.store(p_mass + out * blocks + block, mass, in_c)
    if ENTROPY:
        tl.store(p_moment + out * blocks + block, moment, in_c)


@triton.jit
def average_kernel(
    p_raw,
    p_peak,
    p_mass,
    p_moment,
    p_slots,
    p_lengths,
    p_scores,
    p_closed,
    p_flat,
    max_units,
    blocks,
    sinks,
    select,
    threshold,
    LANE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Program (lane, block of tokens): mean softmax over the lane's ``HEADS`` query heads.

    The first program of a lane writes how many tokens it has, and, for ``ENTROPY``, whether it is
    flat: then its tokens stand in ``p_flat`` instead of ``p_closed``. ``SPAN`` tokens have one
    maximum and one sum.
    """
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = lane // LANE_HEADS
    slot = tl.load(p_slots + row)
    closed = tl.maximum(tl.load(p_lengths + row) - 1, 0)
    closed = tl.where(slot < 0, 0, closed)
    if block == 0:
        tl.store(p_closed + lane, closed)
        if ENTROPY:
            tl.store(p_flat + lane, 0)
    if block * BLOCK_V >= closed:
        return
    h = tl.arange(0, BLOCK_H)
    in_h = h < HEADS
    head = lane * HEADS + h
    used = (closed + SPAN - 1) // SPAN
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    moment = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, used, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = head[:, None] * blocks + p[None, :]
        inside = in_h[:, None] & (p < used)[None, :]
        peaks = tl.load(p_peak + at, inside, other=float("-inf"))
        peaks = tl.where(in_h[:, None], peaks, 0.0)
        higher = tl.maximum(peak, tl.max(peaks, 1))
        shrink, grow = tl.exp(peak - higher), tl.exp(peaks - higher[:, None])
        total = total * shrink + tl.sum(tl.load(p_mass + at, inside, other=0.0) * grow, 1)
        if ENTROPY:
            moment = moment * shrink + tl.sum(tl.load(p_moment + at, inside, other=0.0) * grow, 1)
        peak = higher
    total = tl.where(in_h, total, 1.0)
    if ENTROPY:  # noqa: SIM102 - known when compiling, the second is not
        if block == 0:
            entropy = tl.log(total) + peak - moment / total
            flatness = tl.sum(tl.where(in_h, entropy, 0.0), 0) / HEADS
            most = tl.log(tl.maximum(closed, 2).to(tl.float32))
            if (flatness > threshold * most) & (closed > select):
                tl.store(p_closed + lane, 0)
                tl.store(p_flat + lane, closed)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = v < closed
    inside = in_h[:, None] & in_v[None, :]
    raw = tl.load(p_raw + head[:, None] * max_units + v[None, :], inside, other=float("-inf"))
    mean = tl.sum(tl.exp(raw - peak[:, None]) / total[:, None], 0) / HEADS
    mean = tl.where(v < sinks, float("inf"), mean)
    tl.store(p_scores + lane * max_units + v, mean, in_v)
