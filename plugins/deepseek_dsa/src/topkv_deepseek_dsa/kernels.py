"""Kernels that score tokens, in Triton, beside ``reference.scores``.

``query_kernel`` brings the queries of a row into the format of the keys, once, where they are not
in it; ``score_kernel`` multiplies them with tiles of keys. Names: ``p_`` pointers, ``s_`` strides
in elements. Pools are addressed by host row in 64 bit. ``p_scales`` is the fp8 pool read as fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_deepseek_dsa.dealing import dealt, lengths_of
from topkv_deepseek_dsa.formats import (
    codes_of,
    decode_e4m3,
    hadamard,
    load_fp32,
    scale_of,
    store_as,
)
from topkv_deepseek_dsa.key_kernels import code_at, scale_at


@triton.jit
def query_kernel(
    p_q,
    p_w,
    p_query,
    p_weight,
    p_slots,
    p_appended,
    s_q_row,
    s_q_head,
    s_w_row,
    s_w_head,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    HADAMARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    Q_BF16: tl.constexpr,
    POOL_BF16: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (query of a row, ``BLOCK_H`` heads): it as codes or in the dtype of the keys, and
    its weights.

    The scale of a query goes into its weight. Padded rows, and queries that are padding, are left
    out.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(p_slots + row // QUERIES) < 0:
        return
    if QUERIES > 1:  # noqa: SIM102 - one is a constant
        if row % QUERIES >= tl.maximum(tl.load(p_appended + row // QUERIES), 1):
            return
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    d = tl.arange(0, DIM)[None, :]
    real = h < HEADS
    p_row = p_q + row * s_q_row + h[:, None] * s_q_head
    x = load_fp32(p_row + d, real[:, None], Q_BF16)
    weight = tl.load(p_w + row * s_w_row + h * s_w_head, real, other=0.0).to(tl.float32)
    if HADAMARD:
        x = hadamard(x, LEVELS, FACTOR)
    at = row * HEADS + h
    p_out = p_query + at[:, None] * DIM + d
    if FP8:
        scale = scale_of(x, POWER_OF_TWO)
        weight *= scale
        tl.store(p_out, codes_of(x, scale), real[:, None])
    else:
        store_as(p_out, x, real[:, None], POOL_BF16)
    tl.store(p_weight + at, weight, real)


@triton.jit
def _operand(x, DECODE: tl.constexpr, FACTORS: tl.constexpr):
    """An operand of the product: codes become numbers where the device has no e4m3 product."""
    if DECODE:
        x = decode_e4m3(x)
    return x.to(FACTORS)


@triton.jit
def _prefetch(
    p_keys,
    p_pages,
    start,
    end,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Ask for the keys of ``COUNT`` tokens from ``start`` on that are before ``end``."""
    BYTES: tl.constexpr = DIM * p_keys.dtype.element_ty.primitive_bitwidth // 8
    t = start + tl.arange(0, COUNT)
    # Behind the end the first token is asked for again.
    t = tl.where(t < end, t, start)
    page = tl.load(p_pages + t // PAGE).to(tl.int64)
    at = page * PAGE + t % PAGE
    address = (p_keys + (code_at(at, DIM) if FP8 else at * DIM)).to(tl.int64)
    for line in tl.static_range(0, BYTES, 128):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [address + line],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _places(p_pages, begin, t, length, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Host rows of a tile of tokens ``t``, which begin with ``begin``."""
    if PAGE % TILE == 0:
        # The keys of the tile are in one page, and one look-up gives all addresses.
        page = tl.load(p_pages + begin // PAGE).to(tl.int64)
        return page * PAGE + begin % PAGE + tl.arange(0, TILE)
    page = tl.load(p_pages + t // PAGE, t < length, other=0)
    return page.to(tl.int64) * PAGE + t % PAGE


@triton.jit
def _sums(products, EACH: tl.constexpr, BLOCK_H: tl.constexpr):
    """The largest sum over heads, ``[TILE]`` of ``[TILE, EACH * BLOCK_H]``."""
    if EACH == 1:
        return tl.sum(products, 1)
    TILE: tl.constexpr = products.shape[0]
    return tl.max(tl.sum(tl.reshape(products, [TILE, EACH, BLOCK_H]), 2), 1)


@triton.jit
def _queries(
    p_query,
    p_weight,
    row,
    first,
    new,
    s_q_row,
    s_q_head,
    s_w_row,
    s_w_head,
    QUERIES: tl.constexpr,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
):
    """Heads of ``EACH`` queries of a row from ``first`` on, ``[EACH * BLOCK_H, DIM]``, and their
    weights. Heads that pad the product are copies of the last one, of weight 0; queries that pad
    it are copies of the last of ``new``, and change no maximum.
    """
    d = tl.arange(0, DIM)
    h = tl.arange(0, EACH * BLOCK_H).to(tl.int64)
    at = row
    if QUERIES > 1:
        at = row * QUERIES + tl.minimum(first + h // BLOCK_H, new - 1)
        h = h % BLOCK_H
    at_query = (at * s_q_row + tl.minimum(h, HEADS - 1) * s_q_head)[:, None] + d[None, :]
    weight = tl.load(p_weight + at * s_w_row + h * s_w_head, h < HEADS, other=0.0)
    return tl.load(p_query + at_query), weight.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "running", "waves", "tiles"])
def score_kernel(
    p_query,
    p_weight,
    p_keys,
    p_scales,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    p_scores,
    p_counts,
    max_pages,
    s_q_row,
    s_q_head,
    s_w_row,
    s_w_head,
    s_scores,
    select,
    rows,
    running,
    waves,
    rate,
    tiles,
    QUERIES: tl.constexpr,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    DECODE: tl.constexpr,
    FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    CUDA: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program scores a block of the tokens of a row, fp32.

    Blocks of a step, of ``ROWS`` rows or fewer, are ``dealt``; the first program writes how many
    tokens rows have. If ``ROWS`` is 0, rows are those of a prompt, which read the same keys:
    programs go along them side by side, ``tiles`` tiles each, and nobody asks for counts.

    A tile of keys [tokens, D] is multiplied with the queries [D, heads]: a thread then holds
    heads of the same token side by side, which it sums. Of QUERIES of a row, ``EACH`` are
    multiplied at a time, and a token is worth the largest score. Rows that select all of their
    tokens are not scored. A program that starts early asks for its first ``AHEAD`` tiles of keys
    while it waits for the queries, or waits first if that is 0.
    """
    if PDL and AHEAD == 0:
        tl.extra.cuda.gdc_wait()
    me = tl.program_id(0)
    if ROWS > 0:
        row, block, tiles = dealt(
            *(p_slots, p_lengths, p_appended, rows, running, waves, rate, select),
            *(TILE, ROWS, QUERIES, CUDA),
        )
    else:
        row, block = me % rows, me // rows
    slot = tl.load(p_slots + row, row < rows, other=-1).to(tl.int64)
    length = tl.load(p_lengths + row, row < rows, other=0)
    new = 1
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row, row < rows, other=1), 1)
        length -= new
    length = tl.where((slot < 0) | (length <= select), 0, length)
    start = block * tiles * TILE
    if PDL and AHEAD > 0:  # What is read up to the wait is older than the queries.
        end = tl.minimum(length, start + tiles * TILE)
        if start < end:
            p_mine = p_pages + slot * max_pages
            _prefetch(p_keys, p_mine, start, end, DIM, PAGE, FP8, AHEAD * TILE)
        tl.extra.cuda.gdc_wait()
    if ROWS > 0 and me == 0:
        r, count = lengths_of(p_slots, p_lengths, p_appended, rows, ROWS, QUERIES)
        tl.store(p_counts + r, count, r < rows)
    if start >= length:
        return
    row = row.to(tl.int64)
    d = tl.arange(0, DIM)
    mine = tl.minimum(tiles, tl.cdiv(length - start, TILE))
    for first in tl.static_range(0, QUERIES, EACH):
        query, weight = _queries(
            *(p_query, p_weight, row, first, new, s_q_row, s_q_head, s_w_row, s_w_head),
            *(QUERIES, EACH, HEADS, BLOCK_H, DIM),
        )
        query = tl.trans(_operand(query, DECODE, FACTORS))
        if first > 0:
            tl.debug_barrier()  # other threads wrote the scores that this one reads
        for step in tl.range(0, mine, num_stages=STAGES):
            begin = start + step * TILE
            t = begin + tl.arange(0, TILE)
            at = _places(p_pages + slot * max_pages, begin, t, length, PAGE, TILE)
            # Behind the length stands garbage, which stays in its own rows of the product.
            code = code_at(at, DIM) if FP8 else at * DIM
            keys = tl.load(p_keys + code[:, None] + d[None, :])
            products = tl.dot(_operand(keys, DECODE, FACTORS), query, input_precision="ieee")
            products = tl.maximum(products, 0.0) * weight[None, :]
            score = _sums(products, EACH, BLOCK_H)
            if FP8:
                score *= tl.load(p_scales + scale_at(at, DIM))
            p_out = p_scores + row * s_scores + t
            if first > 0:
                score = tl.maximum(score, tl.load(p_out, t < length, other=0.0))
            tl.store(p_out, score, t < length)
