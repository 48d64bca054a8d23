"""Decode attention over scattered units. Reference: ``reference.Attend``, and where blocks of keys
are skipped ``skip_reference.SkippingAttend``.

One program takes the G query heads of one kv-head of one lane, over one of several equal runs
("splits") of its tokens. Where there are more than one, the partial results go to scratch and
``merge_kernel`` joins them by their log-sum-exp. Query heads, outputs and partial results are
addressed by row and head of the row, whatever lane reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(x, CAP: tl.constexpr):
    """``CAP * tanh(x)``, by the exponential of a negative number, which does not overflow."""
    small = tl.exp2(tl.abs(x) * -2.885390081777927)
    size = CAP * (1 - small) / (1 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def fold(
    q, k, v, live, scale_log2, top, total, acc, UPCAST: tl.constexpr, CAP: tl.constexpr = 0.0
):
    """Online softmax: one more block of keys and values (FlashAttention-2, section 3.1). With CAP,
    that of the logits times log2(e), the scale is over the cap of the plain ones."""
    logits = scored(q, k, live, scale_log2, UPCAST, CAP)
    return absorbed(logits, v, top, total, acc, UPCAST)


@triton.jit
def scored(q, k, live, scale_log2, UPCAST: tl.constexpr, CAP: tl.constexpr):
    """The logits of a block of keys, times log2(e)."""
    if UPCAST:
        k = k.to(tl.float32)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAP > 0:
        logits = capped(logits, CAP)
    return tl.where(live[None, :], logits, float("-inf"))


@triton.jit
def absorbed(logits, v, top, total, acc, UPCAST: tl.constexpr, BLIND: tl.constexpr = False):
    """The running softmax with one more block of logits and values in it. BLIND where a query may
    have seen no token yet."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    floor = new_top
    if BLIND:
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - floor[:, None])
    shrink = tl.exp2(top - floor)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
        v = v.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def matters(logits, top, limit, votes):
    """Return True if a block of keys matters to a query head that votes: its largest logit is not
    below the running maximum, the block included, by more than ``-limit``."""
    peak = tl.max(logits, 1)
    small = peak - tl.maximum(top, peak) < limit
    return tl.max((votes & ~small).to(tl.int32), 0) > 0


# Strides that vary with the number of splits must not make another binary each.
@triton.jit(do_not_specialize=["stride_tn", "stride_lb", "stride_lh", "stride_ls"])
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    stride_qb,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_kt,
    stride_vs,
    stride_vh,
    stride_vt,
    stride_tn,
    stride_tc,
    stride_len,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lb,
    stride_lh,
    stride_ls,
    LANES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    CAP: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    queries_ptr=None,
    stride_qq=0,
    stride_oq=0,
    stride_lq=0,
    SKIP: tl.constexpr = False,
    COUNT: tl.constexpr = False,
    contexts_ptr=None,
    skipped_ptr=None,
    factor_log2=0.0,
):
    """Attend over one split of the tokens of a kv-head of a lane.

    With several QUERIES a row, the i-th of the ``queries`` of a row does not see the newest
    ``queries - 1 - i`` tokens, and those behind them see none.

    With SKIP a block whose logits all are below the running maximum by more than
    ``log2(factor / context)`` is left out, ``contexts`` being the lengths of the rows' requests;
    with COUNT how many were is stored, ``[programs, splits]``. Queries vote on what they see.
    """
    row = (tl.program_id(0) // (LANES * KV_HEADS)).to(tl.int64)
    lane = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + lane * stride_len)
    # Runs follow from the true length, not from the width of the table: lanes stay balanced.
    run = tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    begin = split * run
    end = tl.minimum(begin + run, length)

    each = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    first_head = (tl.program_id(0) % (LANES * KV_HEADS)).to(tl.int64) * GROUP
    if QUERIES == 1:
        query_heads = first_head + each
        q_rows = row * stride_qb + query_heads * stride_qh
        o_rows = row * stride_ob + query_heads * stride_oh
        l_rows = row * stride_lb + query_heads * stride_lh
    else:
        nth = (each // GROUP).to(tl.int64)
        query_heads = first_head + each % GROUP
        q_rows = row * stride_qb + nth * stride_qq + query_heads * stride_qh
        o_rows = row * stride_ob + nth * stride_oq + query_heads * stride_oh
        l_rows = row * stride_lb + nth * stride_lq + query_heads * stride_lh
        queries = tl.load(queries_ptr + row)
        seen = tl.where(nth < queries, length - (queries - 1 - nth), 0)
    in_g = each < GROUP * QUERIES
    q_mask = in_g[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    k_base = k_ptr + head * stride_kh + d[None, :]
    v_base = v_ptr + head * stride_vh + d[None, :]
    units = table_ptr + lane * stride_tn
    tokens = begin + tl.arange(0, BLOCK_N)
    # The table is read one block ahead: the loads of a block then depend on no load of their
    # own iteration, and the whole pipeline depth goes to keys and values.
    ids = tl.load(units + (tokens // UNIT) * stride_tc, mask=tokens < end, other=0)

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if SKIP:
        context = tl.maximum(tl.load(contexts_ptr + row), 1).to(tl.float32)
        # At most 0, so that a block which holds a maximum is never left out.
        limit = tl.minimum(factor_log2 - tl.log2(context), 0.0)
        skipped = 0
    for first in range(begin, end, BLOCK_N):
        live = tokens < end
        kv_mask = live[:, None]
        if BLOCK_D != DIM:
            kv_mask = kv_mask & (d < DIM)[None, :]
        slot = ids.to(tl.int64)
        place = (tokens % UNIT).to(tl.int64)
        k_offsets = (slot * stride_ks + place * stride_kt)[:, None]
        k = tl.load(k_base + k_offsets, mask=kv_mask, other=0.0, eviction_policy="evict_first")
        v_offsets = (slot * stride_vs + place * stride_vt)[:, None]
        if SKIP:
            logits = scored(q, k, live, scale_log2, UPCAST, CAP)
            votes, so_far = in_g, top
            if QUERIES > 1:
                logits = tl.where(tokens[None, :] < seen[:, None], logits, float("-inf"))
                votes = in_g & (first < seen)
                so_far = tl.where(votes, top, 0.0)
            if matters(logits, so_far, limit, votes):
                v = tl.load(v_base + v_offsets, mask=kv_mask, other=0.0,
                            eviction_policy="evict_first")  # fmt: skip
                top, total, acc = absorbed(logits, v, top, total, acc, UPCAST, QUERIES > 1)
            else:
                skipped += 1
        else:
            v = tl.load(v_base + v_offsets, mask=kv_mask, other=0.0, eviction_policy="evict_first")
            if QUERIES == 1:
                top, total, acc = fold(q, k, v, live, scale_log2, top, total, acc, UPCAST, CAP)
            else:
                logits = scored(q, k, live, scale_log2, UPCAST, CAP)
                logits = tl.where(tokens[None, :] < seen[:, None], logits, float("-inf"))
                top, total, acc = absorbed(logits, v, top, total, acc, UPCAST, True)
        tokens += BLOCK_N
        ids = tl.load(units + (tokens // UNIT) * stride_tc, mask=tokens < end, other=0)

    # A run without tokens keeps top -inf and total 0: out 0, lse -inf.
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    norm = (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453
    tl.store(lse_ptr + l_rows + split.to(tl.int64) * stride_ls, norm, mask=in_g)
    out = out.to(out_ptr.dtype.element_ty)
    o_offsets = o_rows + split.to(tl.int64) * stride_os
    tl.store(out_ptr + o_offsets[:, None] + d[None, :], out, mask=q_mask)
    if COUNT:
        tl.store(skipped_ptr + tl.program_id(0) * tl.num_programs(1) + split, skipped)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    splits,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    stride_oq=0,
    stride_lq=0,
):
    """Parts are contiguous: ``[B, QUERIES, HEADS, splits, DIM]`` and ``[B, QUERIES, HEADS,
    splits]``, fp32. One program: BLOCK_D elements of one head."""
    part_row = tl.program_id(0).to(tl.int64)
    row = part_row // (HEADS * QUERIES)
    head = part_row % HEADS
    nth = part_row // HEADS % QUERIES
    out_ptr += nth * stride_oq
    lse_ptr += nth * stride_lq
    s = tl.arange(0, BLOCK_S)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    part_lse = tl.load(part_lse_ptr + part_row * splits + s, mask=s < splits, other=float("-inf"))
    offsets = (part_row * splits + s)[:, None] * DIM + d[None, :]
    mask = (s < splits)[:, None] & (d < DIM)[None, :]
    part = tl.load(part_ptr + offsets, mask=mask, other=0.0)
    top = tl.max(part_lse, 0)
    floor = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(part_lse - floor)
    total = tl.sum(weights, 0)
    safe = tl.where(total > 0, total, 1.0)
    out = tl.sum(weights[:, None] * part, 0) / safe
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row * stride_lb + head * stride_lh, top + tl.log(safe))
    o_offsets = row * stride_ob + head * stride_oh + d
    tl.store(out_ptr + o_offsets, out.to(out_ptr.dtype.element_ty), mask=d < DIM)
