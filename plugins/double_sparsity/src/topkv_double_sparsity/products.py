"""Products of queries and labels in Triton, beside ``reference.head_logits``."""

from __future__ import annotations

import triton
import triton.language as tl

# Two 16-bit words hold eight codes. Each result is one code of both as bfloat16 of 16 + code:
# 0x4180 is 16.0, and bit 3 is worth 1.
_UNPACK = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    shl.b32 a, $4, 3;
    shr.b32 b, $4, 1;
    shr.b32 c, $4, 5;
    shr.b32 d, $4, 9;
    lop3.b32 $0, a, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $1, b, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $2, c, 0x00780078, 0x41804180, 0xEA;
    lop3.b32 $3, d, 0x00780078, 0x41804180, 0xEA;
    }"""
)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2 ** x; ``FAST`` in one instruction, which flushes subnormals."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2(x, FAST: tl.constexpr):
    """Logarithm of base 2 of x >= 1; ``FAST`` in one instruction, off by 2 ** -22 at most."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def column(c, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr):
    """kv-head and query head of column c of a bundle.

    In the order [pairs of query heads, kv-heads, 2]: with four kv-heads a thread of the product
    holds two neighbours of every eight columns, so all query heads of one kv-head, and nothing
    moves between threads where they are reduced.
    """
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    return c // PAIR % BLOCK_H, c // (PAIR * BLOCK_H) * PAIR + c % PAIR


@triton.jit
def by_head(x, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr):
    """Columns ``[n, C]`` as ``[n, pairs, kv-heads, 2]``."""
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    return tl.reshape(x, [x.shape[0], BLOCK_G // PAIR, BLOCK_H, PAIR])


@triton.jit
def appended_of(p_appended, row, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """New tokens of a row, 1 or more, and query heads of a kv-head that are no padding."""
    if QUERIES > 1:
        new = tl.maximum(tl.load(p_appended + row), 1)
        return new, new * (GROUP // QUERIES)
    return 1, GROUP


@triton.jit
def _gather(
    p_q,
    p_channels,
    p_ranges,
    s_q_head,
    held,
    PART: tl.constexpr,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Queries ``[BLOCK_K, BLOCK_H * BLOCK_G]`` of ``HEADS`` kv-heads, zero off the block diagonal.

    Row ``head * WORDS + word`` stands for the channel of code ``PART`` of a word of the label:
    codes are the low and the high half of one byte or, of four, of two. A query is multiplied by
    the power of two that divides the coded channel. Of a kv-head the first ``held`` are there.
    """
    BYTES: tl.constexpr = max(PARTS // 2, 1)
    k, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H * BLOCK_G)
    head = k // WORDS
    j = k % WORDS * BYTES + PART // 2 + PART % 2 * (WORDS * BYTES)
    in_k = (head < HEADS) & (j < R)
    channel = tl.load(p_channels + head * R + j, in_k, other=0)
    of_head, g = column(c, BLOCK_H, BLOCK_G)
    mine = (head[:, None] == of_head[None, :]) & in_k[:, None]
    mine &= (g < held)[None, :]
    query = (of_head * GROUP + g).to(tl.int64)
    q = tl.load(p_q + query[None, :] * s_q_head + channel[:, None], mine, other=0.0)
    if PARTS > 1:
        divisor = tl.load(p_ranges + 2 * (head * R + j) + 1, in_k, other=1.0)
        q = (q.to(tl.float32) * divisor[:, None]).to(q.dtype)
    return q


@triton.jit
def prepare_query(
    p_q,
    p_channels,
    p_ranges,
    p_query,
    p_total,
    s_q_head,
    held,
    bundle,
    block,
    scale,
    R: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    FP32: tl.constexpr,
):
    """Queries of a bundle, a tuple by the codes of a word, and the column sums times ``scale``.

    Block 0 stores all for ``stored_query``. ``FP32`` multiplies in fp32, for fp32 queries and
    for the interpreter, which has no bfloat16 product.
    """
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    c = tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_K)[:, None] * BLOCK_C + c[None, :]
    p_mine = p_query + bundle * (PARTS * BLOCK_K * BLOCK_C)
    total = tl.zeros([BLOCK_C], tl.float32)
    queries = ()
    for part in tl.static_range(PARTS):
        query = _gather(
            *(p_q, p_channels, p_ranges, s_q_head, held, part),
            *(R, WORDS, HEADS, GROUP, BLOCK_K, BLOCK_H, BLOCK_G, PARTS),
        )
        total += tl.sum(query.to(tl.float32), 0) * scale
        if block == 0:
            tl.store(p_mine + part * (BLOCK_K * BLOCK_C) + at, query)
        queries = queries + (query.to(tl.float32) if FP32 else query,)  # noqa: RUF005 - no star
    if block == 0:
        tl.store(p_total + bundle * BLOCK_C + c, total)
    return queries, total


@triton.jit
def stored_query(
    p_query,
    bundle,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    FP32: tl.constexpr,
):
    """Queries and column sums that block 0 of ``prepare_query`` stored."""
    at = tl.arange(0, BLOCK_K)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    p_mine = p_query + bundle * (PARTS * BLOCK_K * BLOCK_C)
    queries = ()
    for part in tl.static_range(PARTS):
        query = tl.load(p_mine + part * (BLOCK_K * BLOCK_C) + at)
        queries = queries + (query.to(tl.float32) if FP32 else query,)  # noqa: RUF005 - no star
    return queries


@triton.jit
def _affine(
    p_meta,
    at,
    in_t,
    first,
    total,
    scale,
    offset,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Factors of the sums of queries times codes, and what is added to these; as in ``by_head``.

    Scale and zero of a token and kv-head are read as one word.
    """
    h = tl.arange(0, BLOCK_H)
    p_word = p_meta + at[:, None] * KV_HEADS + first + h[None, :]
    if BLOCK_H == HEADS and WHOLE:
        word = tl.load(p_word)
    else:
        word = tl.load(p_word, in_t[:, None] & (h < HEADS)[None, :], other=0)
    step = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if PARTS == 4:
        zero -= 16 * step
    rest = by_head(total[None, :], BLOCK_H, BLOCK_G) * zero[:, None, :, None]
    rest -= by_head(offset[None, :], BLOCK_H, BLOCK_G)
    return (step * scale)[:, None, :, None], rest


@triton.jit
def products(
    p_labels,
    p_meta,
    at,
    in_t,
    first,
    queries,
    total,
    scale,
    offset,
    KV_HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Logits ``scale * q.label - offset`` of host rows ``at``, fp32 ``[TILE, C]``.

    4-bit codes are whole numbers, exact in every dtype; scale and zero are applied to the fp32
    sums. Words of four codes are unpacked two codes at a time; these are 16 too large, which the
    zero takes back. ``WHOLE`` says that all rows exist, those that ``in_t`` leaves out as well:
    then nothing is masked.
    """
    k = tl.arange(0, BLOCK_K)
    p_tile = p_labels + at[:, None] * (KV_HEADS * WORDS) + first * WORDS + k[None, :]
    if BLOCK_K == HEADS * WORDS and WHOLE:
        label = tl.load(p_tile)
    else:
        label = tl.load(p_tile, in_t[:, None] & (k < HEADS * WORDS)[None, :], other=0)
    if PARTS == 1:
        codes = (label.to(queries[0].dtype),)
    elif PARTS == 2:
        codes = (label & 15).to(queries[0].dtype), (label >> 4).to(queries[0].dtype)
    else:
        codes = tl.inline_asm_elementwise(
            *(_UNPACK, "=r,=r,=r,=r,r", [label]),
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    raw = tl.dot(codes[0], queries[0], input_precision="ieee")
    for part in tl.static_range(1, PARTS):
        raw = tl.dot(codes[part], queries[part], acc=raw, input_precision="ieee")
    if PARTS == 1:
        logits = raw * scale - offset[None, :]
    else:
        step, rest = _affine(
            *(p_meta, at, in_t, first, total, scale, offset),
            *(KV_HEADS, HEADS, BLOCK_H, BLOCK_G, PARTS, WHOLE),
        )
        logits = by_head(raw, BLOCK_H, BLOCK_G) * step + rest
        logits = tl.reshape(logits, [raw.shape[0], BLOCK_H * BLOCK_G])
    return logits
