"""What a prompt and a step write, in Triton: index keys to the pool.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host row in 64 bit.
``p_scales`` is the fp8 pool read as fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_deepseek_dsa.formats import codes_of, hadamard, load_fp32, scale_of, store_as


@triton.jit
def scale_at(at, DIM: tl.constexpr):
    """Where the scales of rows ``at`` lie, in the pool read as fp32: behind their block."""
    return at // 64 * (16 * (DIM + 4)) + 16 * DIM + at % 64


@triton.jit
def code_at(at, DIM: tl.constexpr):
    """First bytes of the codes of rows ``at``."""
    return at // 64 * (64 * (DIM + 4)) + at % 64 * DIM


@triton.jit
def _write(
    p_key,
    p_keys,
    p_scales,
    at,
    valid,
    DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    HADAMARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    KEY_BF16: tl.constexpr,
    POOL_BF16: tl.constexpr,
):
    """Index keys at ``p_key [n]`` to rows ``at [n]``, where ``valid [n]``."""
    d = tl.arange(0, DIM)[None, :]
    x = load_fp32(p_key[:, None] + d, valid[:, None], KEY_BF16)
    if HADAMARD:
        x = hadamard(x, LEVELS, FACTOR)
    if FP8:
        scale = scale_of(x, POWER_OF_TWO)
        tl.store(p_keys + code_at(at, DIM)[:, None] + d, codes_of(x, scale), valid[:, None])
        tl.store(p_scales + scale_at(at, DIM), scale, valid)
    else:
        store_as(p_keys + at[:, None] * DIM + d, x, valid[:, None], POOL_BF16)


@triton.jit(do_not_specialize=["start", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_keys,
    p_scales,
    p_pages,
    start,
    tokens,
    s_token,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    HADAMARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    KEY_BF16: tl.constexpr,
    POOL_BF16: tl.constexpr,
):
    """Program (tokens of the chunk); ``p_pages`` of the request."""
    nth = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = nth < tokens
    token = start + nth
    page = tl.load(p_pages + token // PAGE, valid, other=0).to(tl.int64)
    _write(
        *(p_k + nth.to(tl.int64) * s_token, p_keys, p_scales, page * PAGE + token % PAGE, valid),
        *(DIM, LEVELS, FACTOR, FP8, HADAMARD, POWER_OF_TWO, KEY_BF16, POOL_BF16),
    )


@triton.jit(do_not_specialize=["batch"])
def update_kernel(
    p_k,
    p_keys,
    p_scales,
    p_pages,
    p_slots,
    p_lengths,
    p_appended,
    batch,
    max_pages,
    s_row,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTOR: tl.constexpr,
    FP8: tl.constexpr,
    HADAMARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    KEY_BF16: tl.constexpr,
    POOL_BF16: tl.constexpr,
):
    """Program (rows): the key of the token that each row appended."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < batch
    slot = tl.load(p_slots + row, inside, other=-1).to(tl.int64)
    token = tl.load(p_lengths + row, inside, other=0) - 1
    appended = tl.load(p_appended + row, inside, other=0)
    valid = (slot >= 0) & (token >= 0) & (appended != 0)
    page = tl.load(p_pages + slot * max_pages + token // PAGE, valid, other=0).to(tl.int64)
    _write(
        *(p_k + row.to(tl.int64) * s_row, p_keys, p_scales, page * PAGE + token % PAGE, valid),
        *(DIM, LEVELS, FACTOR, FP8, HADAMARD, POWER_OF_TWO, KEY_BF16, POOL_BF16),
    )
