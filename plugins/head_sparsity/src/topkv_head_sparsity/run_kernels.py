"""Mean keys of runs in 4 bits, in Triton, beside ``reference.means`` and ``reference.encode``.

Launched without fused multiply-adds: the same bits as those of the reference. Names: ``p_``
pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_head_sparsity import reference

RUN = tl.constexpr(reference.RUN)
LEVELS = tl.constexpr(reference.LEVELS)


@triton.jit
def _means(p_key, s_token, tokens, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, J: tl.constexpr):
    """fp32 ``[BLOCK_R, J]``: ``WIDTH`` channels from ``p_key`` on; 0 of a run without tokens."""
    first = tl.arange(0, BLOCK_R)[:, None] * RUN
    j = tl.arange(0, J)[None, :]
    total = tl.zeros([BLOCK_R, J], tl.float32)
    for nth in tl.static_range(RUN):
        t = first + nth
        there = (t < tokens) & (j < WIDTH)
        total += tl.load(p_key + t.to(tl.int64) * s_token + j, there, other=0).to(tl.float32)
    count = tl.minimum(tl.maximum(tokens - first, 1), RUN).to(tl.float32)
    return tl.div_rn(total, count + tl.zeros_like(total))


@triton.jit
def _codes(mean, step):
    number = tl.floor(tl.div_rn(mean, step[:, None] + tl.zeros_like(mean)) + 0.5)
    number = tl.minimum(tl.maximum(number, -LEVELS), LEVELS)
    return number.to(tl.int32) + (LEVELS + 1)


@triton.jit
def _write_unit(
    p_key,
    s_token,
    tokens,
    p_codes,
    p_scale,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write codes and scales of the first ``tokens`` keys at ``p_key``; others are not read."""
    low = _means(p_key, s_token, tokens, WIDTH, BLOCK_R, BLOCK_W)
    high = _means(p_key + WIDTH, s_token, tokens, D - WIDTH, BLOCK_R, BLOCK_W)
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.div_rn(most, tl.zeros_like(most) + LEVELS)
    step = tl.where(scale > 0, scale, 1.0)
    r = tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_W)[None, :]
    codes = _codes(low, step) | tl.where(j < D - WIDTH, _codes(high, step), 0) << 4
    inside = (r < RUNS)[:, None] & (j < WIDTH)
    tl.store(p_codes + r[:, None] * WIDTH + j, codes.to(tl.uint8), inside)
    tl.store(p_scale + r, scale, r < RUNS)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_codes,
    p_scale,
    p_pages,
    first_unit,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (unit of the chunk, kv-head); ``p_pages`` is the request's row of pages."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    unit = first_unit + nth
    page = tl.load(p_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = ((page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head) * RUNS
    p_key = p_k + nth * UNIT * s_token + head * s_head
    held = tl.minimum(tokens - nth * UNIT, UNIT)
    _write_unit(
        *(p_key, s_token, held, p_codes + at * WIDTH, p_scale + at),
        *(RUNS, D, WIDTH, BLOCK_R, BLOCK_W),
    )


@triton.jit
def update_kernel(
    p_k,
    p_ring,
    p_codes,
    p_scale,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    s_row,
    s_row_head,
    s_slot,
    s_lane,
    s_unit,
    s_head,
    s_token,
    HEADS_PER_LANE: tl.constexpr,
    T: tl.constexpr,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (row, kv-head): write the open unit anew from the ring, or from the key itself where
    units are of one token, which may have no ring."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    unit = newest // UNIT
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = ((page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head) * RUNS
    if UNIT == 1:
        p_key = p_k + row * s_row + head * s_row_head
    else:
        p_key = p_ring + slot * s_slot + (head // HEADS_PER_LANE) * s_lane
        p_key += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
    _write_unit(
        *(p_key, s_token, newest % UNIT + 1, p_codes + at * WIDTH, p_scale + at),
        *(RUNS, D, WIDTH, BLOCK_R, BLOCK_W),
    )
