"""Causal attention of a prefill chunk. Reference: ``reference.Prefill``."""

from __future__ import annotations

import triton
import triton.language as tl

from topkv_triton_attention.decode_kernels import capped


@triton.jit
def _step(
    q,
    q_rest,
    k_base,
    v_base,
    keep_base,
    start,
    keys,
    limit,
    stride_kn,
    stride_vn,
    top,
    total,
    acc,
    scale_log2,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    KEEP: tl.constexpr,
    EDGE: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """One block of keys; ``limit`` is the last key that each query sees. Without EDGE every
    query sees the whole block, as far as causality goes."""
    d = tl.arange(0, BLOCK_D)
    j = start + tl.arange(0, BLOCK_N)
    mask = (d < DIM)[None, :]
    if EDGE:
        mask = mask & (j < keys)[:, None]
    rows = j.to(tl.int64)[:, None]
    k = tl.load(k_base + rows * stride_kn + d[None, :], mask=mask, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST:
        r = tl.arange(0, BLOCK_R)
        rest_mask = (r < REST)[None, :]
        if EDGE:
            rest_mask = rest_mask & (j < keys)[:, None]
        rest = tl.load(k_base + rows * stride_kn + DIM + r[None, :], mask=rest_mask, other=0.0)
        if UPCAST:
            rest = rest.to(tl.float32)
        logits = tl.dot(q_rest, tl.trans(rest), logits, input_precision="ieee")
    logits *= scale_log2
    if CAP > 0:  # see fold
        logits = capped(logits, CAP)
    if EDGE:
        seen = (j[None, :] <= limit[:, None]) & (j < keys)[None, :]
        logits = tl.where(seen, logits, float("-inf"))
    if KEEP:
        kept = tl.load(keep_base + j[None, :], mask=(j < keys)[None, :], other=0)
        logits = tl.where(kept, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    floor = new_top
    if EDGE or KEEP:
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - floor[:, None])
    shrink = tl.exp2(top - floor)
    total = total * shrink + tl.sum(weights, 1)
    v = k if LATENT else tl.load(v_base + rows * stride_vn + d[None, :], mask=mask, other=0.0)
    acc = acc * shrink[:, None]
    weights = weights.to(v.dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
        v = v.to(tl.float32)
    acc = tl.dot(weights, v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["rows", "keys", "offset"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keep_ptr,
    out_ptr,
    lse_ptr,
    rows,
    keys,
    offset,
    scale_log2,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_keep,
    stride_om,
    stride_oh,
    stride_lm,
    stride_lh,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    KEEP: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
):
    """Query i sees key j iff ``j <= i + offset`` and, with KEEP, ``keep[i, j]``. One program:
    BLOCK_M queries of one head. Values have DIM elements, queries and keys REST more; with LATENT
    the values are the first elements of the keys, and are not read again."""
    # The last queries see most keys; they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    i = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = i.to(tl.int64)
    q_mask = (i < rows)[:, None] & (d < DIM)[None, :]
    q_offsets = row[:, None] * stride_qm + head * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    q_rest = q
    if REST:
        r = tl.arange(0, BLOCK_R)
        rest_mask = (i < rows)[:, None] & (r < REST)[None, :]
        rest_offsets = row[:, None] * stride_qm + head * stride_qh + DIM + r[None, :]
        q_rest = tl.load(q_ptr + rest_offsets, mask=rest_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_rest = q_rest.to(tl.float32)
    k_base = k_ptr + kv_head * stride_kh
    v_base = v_ptr + kv_head * stride_vh
    # Queries behind the last one read the last row, and are not stored.
    keep_base = keep_ptr + tl.minimum(row, rows - 1)[:, None] * stride_keep

    limit = i + offset
    end = tl.minimum(keys, tl.minimum(first + BLOCK_M, rows) + offset)
    whole = tl.maximum(tl.minimum(keys, first + offset + 1), 0) // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, whole, BLOCK_N):
        top, total, acc = _step(
            q, q_rest, k_base, v_base, keep_base, start, keys, limit, stride_kn, stride_vn,
            top, total, acc, scale_log2,
            DIM, REST, BLOCK_D, BLOCK_R, BLOCK_N, LATENT, KEEP, False, UPCAST, CAP,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        top, total, acc = _step(
            q, q_rest, k_base, v_base, keep_base, start, keys, limit, stride_kn, stride_vn,
            top, total, acc, scale_log2,
            DIM, REST, BLOCK_D, BLOCK_R, BLOCK_N, LATENT, KEEP, True, UPCAST, CAP,
        )  # fmt: skip

    safe = tl.where(total > 0, total, 1.0)
    norm = (top + tl.log2(safe)) * 0.6931471805599453
    tl.store(lse_ptr + row * stride_lm + head * stride_lh, norm, mask=i < rows)
    o_offsets = row[:, None] * stride_om + head * stride_oh + d[None, :]
    tl.store(out_ptr + o_offsets, acc / safe[:, None], mask=q_mask)
