"""Kernels that score codes, in Triton, beside ``reference.table``, ``reference.coded_scores`` and
``reference.open_scores``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by slot in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.lane_scores_kernels import fold, tokens_before
from topkv_pqcache.algorithm import State

STATE = tl.constexpr(len(State))
BOOKS = tl.constexpr(int(State.BOOKS))
CODED = tl.constexpr(int(State.CODED))


@triton.jit
def table_kernel(
    p_q,
    p_centroids,
    p_state,
    p_slots,
    p_table,
    max_books,
    logit_scale,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SUB: tl.constexpr,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUPED: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (row x kv-head, codebook, sub-vector): scaled ``q_i . mu_ic`` of the head's query
    heads, fp32 ``[COUNT, GROUPED]``, for codebooks that there are.

    Products of 16-bit numbers are exact in the fp32 sums of the tensor cores. ``FP32`` multiplies
    in fp32, for fp32 models and for the interpreter.
    """
    pair = tl.program_id(0).to(tl.int64)
    book = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    if book >= tl.load(p_state + slot * STATE + BOOKS):
        return
    c = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    in_c = c < COUNT
    p_tile = p_q + row * s_row + (head * GROUP + g[None, :]) * s_head + part * D + d[:, None]
    q = tl.load(p_tile, (d < D)[:, None] & (g < GROUP)[None, :], other=0.0)
    at = ((slot * KV_HEADS + head) * max_books + book) * SUB + part
    p_tile = p_centroids + (at * COUNT + c[:, None]) * D + d[None, :]
    mu = tl.load(p_tile, in_c[:, None] & (d < D)[None, :], other=0.0)
    if FP32:
        terms = tl.dot(mu.to(tl.float32), q.to(tl.float32), input_precision="ieee")
    else:
        terms = tl.dot(mu, q)
    at = (pair * max_books + book) * SUB + part
    p_out = p_table + (at * COUNT + c[:, None]) * GROUPED + g[None, :]
    tl.store(p_out, terms * logit_scale, in_c[:, None] & (g < GROUP)[None, :])


@triton.jit
def _last(starts, there, token):
    """The last codebook that starts at or before a token; -1 without any."""
    return tl.sum(((starts <= token) & there).to(tl.int32), 0) - 1


@triton.jit
def _open_scores(
    p_q,
    p_keys,
    t,
    inside,
    s_head,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``q·k`` of open tokens ``t [TILE]``, fp32 ``[TILE, GROUPED]``; 0 where not ``inside``.

    ``BLOCK_D`` channels at a time, which registers hold for a tile of keys.
    """
    scores = tl.zeros([t.shape[0], GROUPED], tl.float32)
    place = (t % PLACES)[:, None] * D
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        p_tile = p_keys + place + d[None, :]
        keys = tl.load(p_tile, inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        for g in tl.static_range(GROUP):
            q = tl.load(p_q + g * s_head + d, d < D, other=0.0).to(tl.float32)
            products = tl.sum(keys * q[None, :], 1)
            scores += tl.where(tl.arange(0, GROUPED)[None, :] == g, products[:, None], 0.0)
    return scores


@triton.jit
def score_kernel(
    p_q,
    p_table,
    p_codes,
    p_starts,
    p_keys,
    p_state,
    p_slots,
    p_lengths,
    p_appended,
    p_raw,
    p_peak,
    p_mass,
    max_books,
    max_units,
    blocks,
    logit_scale,
    s_row,
    s_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SUB: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPED: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (row x kv-head, block of tokens): scaled scores of the head's query heads, and the
    maximum and the exponential sum of the block. The ``GROUP`` heads of a kv-head are those of all
    QUERIES of the row.

    Of tokens with codes sums of table entries, of open ones products with their keys.
    """
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = pair // KV_HEADS
    head = pair % KV_HEADS
    slot = tl.load(p_slots + row).to(tl.int64)
    closed = tokens_before(p_lengths, p_appended, row, QUERIES)
    start = block * TILES * TILE
    if (slot < 0) | (start >= closed):
        return
    books = tl.load(p_state + slot * STATE + BOOKS)
    coded = tl.minimum(tl.load(p_state + slot * STATE + CODED), closed)
    p_starts += slot * max_books
    p = tl.arange(0, BLOCK_P)
    starts = tl.load(p_starts + p, p < books, other=0)
    g = tl.arange(0, GROUPED)
    in_g = g < GROUP
    first = pair * GROUP + g
    peak = tl.full([GROUPED], float("-inf"), tl.float32)
    mass = tl.zeros([GROUPED], tl.float32)
    p_q += row * s_row + head * GROUP * s_head
    p_codes += (slot * KV_HEADS + head) * max_units * SUB
    p_keys += (slot * KV_HEADS + head) * PLACES * D
    p_table += pair * max_books * SUB * COUNT * GROUPED
    for tile in range(tl.minimum(TILES, tl.cdiv(closed - start, TILE))):
        low = start + tile * TILE
        t = low + tl.arange(0, TILE)
        in_t = t < closed
        has_code = t < coded
        # The codebook of the first token, and one more behind each start in the tile.
        before = _last(starts, p < books, low)
        book = tl.full([TILE], 0, tl.int32) + before
        for later in range(before + 1, _last(starts, p < books, low + TILE) + 1):
            book += (t >= tl.load(p_starts + later)).to(tl.int32)
        inside = has_code[:, None] & in_g[None, :]
        scores = tl.zeros([TILE, GROUPED], tl.float32)
        for part in tl.static_range(SUB):
            code = tl.load(p_codes + t.to(tl.int64) * SUB + part, has_code, other=0)
            at = (book.to(tl.int64) * SUB + part) * COUNT + code
            scores += tl.load(p_table + at[:, None] * GROUPED + g[None, :], inside, other=0.0)
        if low + TILE > coded:
            open_ = in_t & (t >= coded)
            own = _open_scores(p_q, p_keys, t, open_, s_head, GROUP, PLACES, GROUPED, D, BLOCK_D)
            scores += own * logit_scale
        p_out = p_raw + first[None, :] * max_units + t[:, None]
        tl.store(p_out, scores, in_t[:, None] & in_g[None, :])
        peak, mass = fold(peak, mass, scores, in_t)
    tl.store(p_peak + first * blocks + block, peak, in_g)
    tl.store(p_mass + first * blocks + block, mass, in_g)
