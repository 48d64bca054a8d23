"""4-bit copies of keys in Triton, beside ``reference.encode``.

Launched without fused multiply-adds: the same bits as those of the reference. Names: ``p_``
pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_authoring.bounds import raised
from topkv_authoring.outliers_kernels import split


@triton.jit
def write_copies(p_key, tensors, at, slot, head, valid, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``reference.encode`` of keys; ``OPTIONS`` are outliers, and a power of two of D or more and
    its logarithm."""
    PAIRS: tl.constexpr = OPTIONS[0]
    WIDE: tl.constexpr = OPTIONS[1]
    LOG_WIDE: tl.constexpr = OPTIONS[2]
    ROWS: tl.constexpr = p_key.shape[0]
    p_codes, p_meta, p_words = tensors
    d = tl.arange(0, WIDE)[None, :]
    inside = valid[:, None] & (d < D)
    key = tl.load(p_key[:, None] + d, inside, other=0).to(tl.float32)
    x, left = split(key, p_words + at * PAIRS, valid, ROWS, WIDE, LOG_WIDE, D, PAIRS)
    x += 0.0
    least = tl.min(tl.where(inside, x, float("inf")), 1)
    most = tl.max(tl.where(inside, x, float("-inf")), 1)
    zero = -raised(-tl.where(valid, least, 0.0)) + 0.0
    span = tl.where(valid, most, 0.0) - zero
    scale = raised(tl.div_rn(span, 15.0 + tl.zeros_like(span)))
    step = tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros_like(x)
    codes = tl.floor(tl.div_rn(x - zero[:, None], step) + 0.5)
    codes = tl.where(d < D, tl.minimum(tl.maximum(codes, 0.0), 15.0), 0.0).to(tl.int32)
    low, high = tl.split(tl.reshape(codes, [ROWS, WIDE // 2, 2]))
    j = tl.arange(0, WIDE // 2)[None, :]
    WIDTH: tl.constexpr = (D + 1) // 2
    p_bytes = p_codes + at[:, None] * WIDTH + j
    tl.store(p_bytes, (low | high << 4).to(tl.uint8), valid[:, None] & (j < WIDTH))
    signed = scale.to(tl.int32, bitcast=True) | tl.where(left, -0x80000000, 0)
    tl.store(p_meta + at * 2, (signed >> 16).to(tl.int16), valid)
    tl.store(p_meta + at * 2 + 1, (zero.to(tl.int32, bitcast=True) >> 16).to(tl.int16), valid)
