"""Kernels that write the index keys of a prompt or a step to the pool, in Triton.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
``p_scales`` is the fp8 pool read as fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_deepseek_dsa.formats import codes_of, hadamard, load_fp32, scale_of, store_as


@triton.jit
def scale_at(at, DIM: tl.constexpr):
    """Offsets of the scales of rows ``at`` in the pool read as fp32: behind their block."""
    return at // 64 * (16 * (DIM + 4)) + 16 * DIM + at % 64


@triton.jit
def code_at(at, DIM: tl.constexpr):
    """First bytes of the codes of rows ``at``."""
    return at // 64 * (64 * (DIM + 4)) + at % 64 * DIM


@triton.jit
def write_keys(p_key, tensors, at, slot, head, valid, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Write index keys to the pool.

    ``OPTIONS``: whether the pool is fp8, whether keys are turned by Hadamard's matrix, whether
    scales are powers of two, whether the pool is bfloat16; and the logarithm of D.
    """
    p_keys, p_scales = tensors
    KEY_BF16: tl.constexpr = p_key.dtype.element_ty == tl.int16
    d = tl.arange(0, D)[None, :]
    x = load_fp32(p_key[:, None] + d, valid[:, None], KEY_BF16)
    if OPTIONS[1]:
        FACTOR: tl.constexpr = D**-0.5
        x = hadamard(x, OPTIONS[4], FACTOR)
    if OPTIONS[0]:
        scale = scale_of(x, OPTIONS[2])
        tl.store(p_keys + code_at(at, D)[:, None] + d, codes_of(x, scale), valid[:, None])
        tl.store(p_scales + scale_at(at, D), scale, valid)
    else:
        store_as(p_keys + at[:, None] * D + d, x, valid[:, None], OPTIONS[3])
