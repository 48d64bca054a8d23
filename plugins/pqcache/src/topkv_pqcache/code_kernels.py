"""Codes and open keys in Triton, beside ``reference.encode`` and ``PQCache.update``.

Launched without fused multiply-adds: distances round as those of the reference do, bit for bit.
Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by slot in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nearest(x, centroids, COUNT: tl.constexpr, BLOCK_D: tl.constexpr, LOG_D: tl.constexpr):
    """The lowest c of the smallest ``|x - mu_c|^2``, of fp32 ``x [BLOCK_D]`` and ``centroids
    [COUNT, BLOCK_D]``: neighbours are added first."""
    difference = x[None, :] - centroids
    total = difference * difference
    for step in tl.static_range(LOG_D):
        even, odd = tl.split(tl.reshape(total, [COUNT, BLOCK_D >> (step + 1), 2]))
        total = even + odd
    return tl.argmin(tl.reshape(total, [COUNT]), 0, tie_break_left=True)


@triton.jit
def _centroids(p_centroids, COUNT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 ``[COUNT, BLOCK_D]`` of one codebook and sub-vector, 0 behind D channels."""
    c = tl.arange(0, COUNT)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(p_centroids + c * D + d, d < D, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["slot", "book", "start", "tokens"],
    do_not_specialize_on_alignment=["p_k"],
)
def encode_kernel(
    p_k,
    p_centroids,
    p_codes,
    slot,
    book,
    start,
    tokens,
    max_books,
    max_units,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    SUB: tl.constexpr,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOG_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program (block of tokens, kv-head, sub-vector): their codes by one codebook."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    pair = slot.to(tl.int64) * KV_HEADS + head
    p_book = p_centroids + ((pair * max_books + book) * SUB + part) * COUNT * D
    centroids = _centroids(p_book, COUNT, D, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    for nth in range(first, tl.minimum(first + BLOCK_T, tokens)):
        p_x = p_k + nth * s_token + head * s_head + part * D
        x = tl.load(p_x + d, d < D, other=0.0).to(tl.float32)
        code = _nearest(x, centroids, COUNT, BLOCK_D, LOG_D)
        tl.store(p_codes + (pair * max_units + start + nth) * SUB + part, code.to(tl.uint8))


@triton.jit
def update_kernel(
    p_k,
    p_keys,
    p_slots,
    p_lengths,
    p_appended,
    s_row,
    s_token,
    s_head,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (token of a row, kv-head): keep its key, for it is open. Of QUERIES tokens those
    behind what the row appends are padding."""
    nth = tl.program_id(0).to(tl.int64)
    row = nth // QUERIES
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    appended = tl.load(p_appended + row)
    if (slot < 0) | (newest < 0) | (appended == 0):
        return
    p_k += row * s_row
    if QUERIES > 1:
        query = nth % QUERIES
        if query >= appended:
            return
        newest += 1 + query - appended
        p_k += query * s_token
    d = tl.arange(0, BLOCK_D)
    key = tl.load(p_k + head * s_head + d, d < D, other=0)
    tl.store(p_keys + ((slot * KV_HEADS + head) * PLACES + newest % PLACES) * D + d, key, d < D)
