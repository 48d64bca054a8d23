"""Products of queries and labels in Triton, beside ``reference.head_logits``."""

from __future__ import annotations

import triton
import triton.language as tl

# Two bfloat16 of 16 + code from two bytes 0x80 | code << 3: 0x4180 is 16.0, and bit 3 is worth 1.
# Four bytes hold the low and the high codes of four channels.
_UNPACK = tl.constexpr(
    """{
    .reg .b32 low, high;
    shl.b32 low, $4, 3;
    shr.b32 high, $4, 1;
    lop3.b32 low, low, 0x78787878, 0x80808080, 0xEA;
    lop3.b32 high, high, 0x78787878, 0x80808080, 0xEA;
    prmt.b32 $0, low, 0x41, 0x4140;
    prmt.b32 $1, low, 0x41, 0x4342;
    prmt.b32 $2, high, 0x41, 0x4140;
    prmt.b32 $3, high, 0x41, 0x4342;
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
def _gather(
    p_q,
    p_channels,
    s_q_head,
    part,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Queries ``[BLOCK_K, BLOCK_H * BLOCK_G]`` of ``HEADS`` kv-heads, zero off the block diagonal.

    Row ``head * WIDTH + j`` stands for channel ``part + j`` of the label of a head.
    """
    k, c = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H * BLOCK_G)
    head, j = k // WIDTH, k % WIDTH + part
    in_k = (head < HEADS) & (j < R)
    channel = tl.load(p_channels + head * R + j, in_k, other=0)
    mine = (head[:, None] == (c // BLOCK_G)[None, :]) & in_k[:, None]
    mine &= (c % BLOCK_G < GROUP)[None, :]
    query = (c // BLOCK_G * GROUP + c % BLOCK_G).to(tl.int64)
    return tl.load(p_q + query[None, :] * s_q_head + channel[:, None], mine, other=0.0)


@triton.jit
def prepare_query(
    p_q,
    p_channels,
    p_query,
    p_total,
    s_q_head,
    bundle,
    block,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    INT4: tl.constexpr,
    FP32: tl.constexpr,
):
    """Queries of a bundle, of the low and, for ``INT4``, the high codes, and the column sums.

    Block 0 stores them for ``stored_query``. ``FP32`` multiplies in fp32, for fp32 queries and
    for the interpreter, which has no bfloat16 product.
    """
    BLOCK_C: tl.constexpr = BLOCK_H * BLOCK_G
    SIZE: tl.constexpr = BLOCK_K * BLOCK_C
    low = _gather(
        *(p_q, p_channels, s_q_head, 0),
        *(R, WIDTH, HEADS, GROUP, BLOCK_K, BLOCK_H, BLOCK_G),
    )
    c = tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_K)[:, None] * BLOCK_C + c[None, :]
    high, total = low, tl.zeros([BLOCK_C], tl.float32)
    if INT4:
        high = _gather(
            *(p_q, p_channels, s_q_head, WIDTH),
            *(R, WIDTH, HEADS, GROUP, BLOCK_K, BLOCK_H, BLOCK_G),
        )
        total = tl.sum(low.to(tl.float32), 0) + tl.sum(high.to(tl.float32), 0)
    if block == 0:
        p_mine = p_query + bundle * (SIZE * (2 if INT4 else 1))
        tl.store(p_mine + at, low)
        if INT4:
            tl.store(p_mine + SIZE + at, high)
        tl.store(p_total + bundle * BLOCK_C + c, total)
    if FP32:
        low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high, total


@triton.jit
def stored_query(
    p_query,
    bundle,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INT4: tl.constexpr,
    FP32: tl.constexpr,
):
    """What block 0 of ``prepare_query`` stored: queries of the low and of the high codes."""
    at = tl.arange(0, BLOCK_K)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    p_mine = p_query + bundle * (SIZE * (2 if INT4 else 1))
    low = tl.load(p_mine + at)
    high = low
    if INT4:
        high = tl.load(p_mine + SIZE + at)
    if FP32:
        low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high


@triton.jit
def products(
    p_labels,
    p_meta,
    at,
    in_t,
    first,
    q,
    q_high,
    total,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    INT4: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Queries times the labels in host rows ``at``, fp32 ``[TILE, BLOCK_H * BLOCK_G]``.

    4-bit codes are whole numbers, exact in every dtype; scale and zero of a token and kv-head,
    read as one word, are applied to the fp32 sums. ``PACKED`` makes two bfloat16 codes by one
    instruction; they are 16 too large, which the zero takes back.
    """
    k = tl.arange(0, BLOCK_K)
    p_tile = p_labels + at[:, None] * (KV_HEADS * WIDTH) + first * WIDTH + k[None, :]
    label = tl.load(p_tile, in_t[:, None] & (k < HEADS * WIDTH)[None, :], other=0)
    if INT4:
        if PACKED:
            low, high = tl.inline_asm_elementwise(
                _UNPACK,
                "=r,=r,=r,=r,r",
                [label],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low, high = (label & 15).to(q.dtype), (label >> 4).to(q.dtype)
        raw = tl.dot(low, q, input_precision="ieee")
        raw = tl.dot(high, q_high, acc=raw, input_precision="ieee")
        h = tl.arange(0, BLOCK_H)
        p_word = p_meta + at[:, None] * KV_HEADS + first + h[None, :]
        word = tl.load(p_word, in_t[:, None] & (h < HEADS)[None, :], other=0)
        step = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if PACKED:
            zero -= 16 * step
        raw = tl.reshape(raw, [raw.shape[0], BLOCK_H, BLOCK_G])
        sums = tl.reshape(total, [1, BLOCK_H, BLOCK_G])
        raw = raw * step[:, :, None] + sums * zero[:, :, None]
        raw = tl.reshape(raw, [raw.shape[0], BLOCK_H * BLOCK_G])
    else:
        raw = tl.dot(label.to(q.dtype), q, input_precision="ieee")
    return raw
