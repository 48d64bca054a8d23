"""``topkv_authoring.outliers`` in Triton, bit for bit.

Called by kernels that are launched without fused multiply-adds. Names: ``p_`` pointers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring import outliers

RATIO = tl.constexpr(outliers.RATIO)
LEAST = tl.constexpr(outliers.LEAST)
MOST = tl.constexpr(outliers.MOST)


@triton.jit
def pair_sum(x, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG_WIDE: tl.constexpr):
    """Sum over the last dimension of ``x [ROWS, WIDE]``, of neighbours first; ``[ROWS]``."""
    for step in tl.static_range(LOG_WIDE):
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDE >> (step + 1), 2]))
        x = even + odd
    return tl.reshape(x, [ROWS])


@triton.jit
def _largest(left, pair):
    """Bits of the largest magnitude of each row of ``left``, and the lowest pair that has it."""
    top = tl.max(left, 1)
    return top, tl.min(tl.where(left == top[:, None], pair, 1 << 20), 1)


@triton.jit
def split(
    x,
    p_words,
    writes,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    LOG_WIDE: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Words of fp32 rows ``x [ROWS, WIDE]``, 0 from D on, to ``p_words [ROWS]`` where ``writes``.

    Returns:
        the rests, fp32 ``[ROWS, WIDE]``, and bool ``[ROWS]``: whether a pair left.
    """
    HALF: tl.constexpr = (D + 1) // 2
    d = tl.arange(0, WIDE)[None, :]
    pair = tl.where(d < HALF, d, d - HALF)
    bits = tl.where(d < D, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    left = bits  # of magnitudes, ordered as they are; -1 of what is gone
    for _ in tl.static_range(PAIRS):
        top, which = _largest(left, pair)
        left = tl.where(pair == which[:, None], -1, left)
    others = tl.where(left >= 0, left, 0).to(tl.float32, bitcast=True)
    bound = RATIO * pair_sum(others, ROWS, WIDE, LOG_WIDE)
    left, rest = bits, x
    any_left = tl.zeros([ROWS], tl.int32)
    for nth in tl.static_range(PAIRS):
        top, which = _largest(left, pair)
        left = tl.where(pair == which[:, None], -1, left)
        top = tl.maximum(top, 0)
        leaves = top.to(tl.float32, bitcast=True) * D > bound
        power = tl.minimum(tl.maximum((top >> 23) - 133, LEAST), MOST)
        inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
        code = tl.floor(x * inverse[:, None] + 0.5)
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        scale = ((127 + power) << 23).to(tl.float32, bitcast=True)
        gone = (pair == which[:, None]) & (d < D) & leaves[:, None]
        rest = tl.where(gone, x - code * scale[:, None], rest)
        byte = tl.where(gone, code.to(tl.int32) & 255, 0)
        word = tl.sum(byte << tl.where(d < HALF, 16, 24), 1)
        word = tl.where(leaves, word | which | ((power - LEAST) << 9), 0)
        tl.store(p_words + nth, word, writes)
        any_left |= leaves.to(tl.int32)
    return rest, any_left != 0


@triton.jit
def products(p_words, live, p_q, in_g, D: tl.constexpr, PAIRS: tl.constexpr):
    """``q . expand(words)``, fp32 ``[G, T]``.

    Args:
        p_words: ``[T]`` pointers to the words of keys, read where ``live`` says so.
        p_q: ``[G]`` pointers to queries, read where ``in_g`` says so.
    """
    HALF: tl.constexpr = (D + 1) // 2
    total = tl.zeros([p_q.shape[0], p_words.shape[0]], tl.float32)
    for nth in tl.range(2 * PAIRS, loop_unroll_factor=1):
        word = tl.load(p_words + nth // 2, live, other=0)
        channel = (word & 511) + nth % 2 * HALF
        byte = (word << (8 - nth % 2 * 8)) >> 24
        scale = ((((word >> 9) & 127) + (LEAST + 127)) << 23).to(tl.float32, bitcast=True)
        inside = in_g[:, None] & ((byte != 0) & (channel < D))[None, :]
        q = tl.load(p_q[:, None] + channel[None, :], inside, other=0.0).to(tl.float32)
        total += q * (byte.to(tl.float32) * scale)[None, :]
    return total
