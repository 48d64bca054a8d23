"""Decode attention over scattered latent rows. Reference: ``mla_reference.Attend``.

A row ``[latent | rope]`` is key and value of one token for all heads (DeepSeek-V2, section 2.1.2;
queries and outputs are those of the latent space). One program takes a block of heads of one
lane, those of all queries of a row in one list, over one of several equal runs ("splits") of its
tokens, and reads each latent once for both products. Partial results go to scratch, and
``decode_kernels.merge_kernel`` joins them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(codes, scale, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Bytes of e4m3fn times scales. No code of a live token is NaN (``latent_fp8`` clamps).

    A scale is a power of two, so each product is exact in 16 bits as it is in 32.
    """
    if INTERPRETED:
        # The interpreter knows no such cast, and no product in bfloat16: put sign, exponent and
        # mantissa into fp32.
        bits = codes.to(tl.uint32)
        normal = (((bits & 0x7F) << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
        small = (bits & 0x7).to(tl.float32) * 0.001953125
        size = tl.where((bits & 0x78) == 0, small, normal)
        values = tl.where((bits & 0x80) != 0, -size, size) * scale
    else:
        # By way of fp16 and fp32: Hopper has fast instructions for these steps, and for the one
        # from fp8 or fp16 to bfloat16 one that is eight times slower.
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
        values = values.to(dtype) * scale.to(dtype)
    return values


@triton.jit
def load_row(
    p_rows,
    live,
    dtype: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Latents ``[BLOCK_N, BLOCK_L]`` and rope parts ``[BLOCK_N, BLOCK_R]`` of the rows that begin
    at the pointers ``p_rows``. With TILES > 0 rows are packed (``topkv_authoring.latent_fp8``): a
    scale per ``LATENT // TILES`` latents, and rope elements in bfloat16. Rows that are not live
    give 0.
    """
    d = tl.arange(0, BLOCK_L)
    mask = live[:, None]
    if BLOCK_L != LATENT:
        mask = mask & (d < LATENT)[None, :]
    latent = tl.load(p_rows[:, None] + d[None, :], mask=mask, other=0)
    p_rope = p_rows + LATENT
    if TILES:
        tile = tl.arange(0, TILES)
        p_scale = p_rope.to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(p_scale[:, None] + tile[None, :], mask=live[:, None], other=0.0)
        p_rope = (p_rope + 4 * TILES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        codes = tl.reshape(latent, [p_rows.shape[0], TILES, BLOCK_L // TILES])
        codes = decoded(codes, scale[:, :, None], dtype, INTERPRETED)
        latent = tl.reshape(codes, [p_rows.shape[0], BLOCK_L])
    r = tl.arange(0, BLOCK_R)
    mask = live[:, None] & (r < ROPE)[None, :]
    rope = tl.load(p_rope[:, None] + r[None, :], mask=mask, other=0.0)
    return latent.to(dtype), rope.to(dtype)


@triton.jit
def fold_latent(
    q_latent,
    q_rope,
    latent,
    rope,
    seen,
    scale_log2,
    top,
    total,
    acc,
    dtype: tl.constexpr,
    UPCAST: tl.constexpr,
    ROPE: tl.constexpr,
    BLIND: tl.constexpr = False,
):
    """Online softmax: one more block of rows (FlashAttention-2, section 3.1). ``seen`` are those
    that each head sees, ``[1 or BLOCK_H, BLOCK_N]``; BLIND where it may have seen none yet."""
    if UPCAST:
        latent = latent.to(tl.float32)
        rope = rope.to(tl.float32)
    logits = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    if ROPE:
        logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision="ieee")
    logits = tl.where(seen, logits * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    floor = new_top
    if BLIND:
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - floor[:, None])
    shrink = tl.exp2(top - floor)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(dtype)
    if UPCAST:
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, latent, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


# Strides that vary with the number of splits must not make another binary each.
@triton.jit(do_not_specialize=["stride_tn", "stride_lb", "stride_lh", "stride_ls"])
def attend_latent_kernel(
    q_ptr,
    rows_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    stride_qb,
    stride_qh,
    stride_rs,
    stride_rt,
    stride_tn,
    stride_tc,
    stride_len,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lb,
    stride_lh,
    stride_ls,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    QUERIES: tl.constexpr = 1,
    queries_ptr=None,
    stride_qq=0,
    stride_oq=0,
    stride_lq=0,
):
    """Attend over one split of the tokens of a lane, with a block of heads.

    With several QUERIES a row, the i-th of the ``queries`` of a row does not see the newest
    ``queries - 1 - i`` tokens, and those behind them see none.
    """
    # The blocks of heads of a lane run side by side: the second finds the rows in the L2 cache.
    blocks: tl.constexpr = (HEADS * QUERIES + BLOCK_H - 1) // BLOCK_H
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    heads = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    length = tl.load(lengths_ptr + lane * stride_len)
    in_heads = heads < HEADS * QUERIES
    q_heads = lane * stride_qb
    o_heads = lane * stride_ob
    l_heads = lane * stride_lb
    if QUERIES > 1:
        nth = heads // HEADS
        heads = heads % HEADS
        q_heads += nth * stride_qq
        o_heads += nth * stride_oq
        l_heads += nth * stride_lq
        queries = tl.load(queries_ptr + lane)
        sight = tl.where(nth < queries, length - (queries - 1 - nth), 0)
    q_heads += heads * stride_qh
    o_heads += heads * stride_oh + split.to(tl.int64) * stride_os
    l_heads += heads * stride_lh + split.to(tl.int64) * stride_ls
    # Runs follow from the true length, not from the width of the table: lanes stay balanced.
    run = tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    begin = split * run
    end = tl.minimum(begin + run, length)

    dtype: tl.constexpr = q_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK_L)
    r = tl.arange(0, BLOCK_R)
    head_mask = in_heads[:, None]
    q_base = q_ptr + q_heads[:, None]
    out_mask = head_mask & (d < LATENT)[None, :]
    q_latent = tl.load(q_base + d[None, :], mask=out_mask, other=0.0)
    rope_mask = head_mask & (r < ROPE)[None, :]
    q_rope = tl.load(q_base + LATENT + r[None, :], mask=rope_mask, other=0.0)
    if UPCAST:
        q_latent = q_latent.to(tl.float32)
        q_rope = q_rope.to(tl.float32)

    units = table_ptr + lane * stride_tn
    tokens = begin + tl.arange(0, BLOCK_N)
    # The table is read one block ahead: the loads of a block depend on no load of their own
    # iteration, and can be started while the block before is multiplied.
    ids = tl.load(units + (tokens // UNIT) * stride_tc, mask=tokens < end, other=0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for _ in range(begin, end, BLOCK_N):
        live = tokens < end
        place = (tokens % UNIT).to(tl.int64)
        p_rows = rows_ptr + ids.to(tl.int64) * stride_rs + place * stride_rt
        latent, rope = load_row(
            p_rows, live, dtype, LATENT, ROPE, TILES, BLOCK_L, BLOCK_R, INTERPRETED
        )  # fmt: skip
        seen = live[None, :] if QUERIES == 1 else tokens[None, :] < sight[:, None]
        top, total, acc = fold_latent(
            q_latent, q_rope, latent, rope, seen, scale_log2, top, total, acc,
            dtype, UPCAST, ROPE, QUERIES > 1,
        )  # fmt: skip
        tokens += BLOCK_N
        ids = tl.load(units + (tokens // UNIT) * stride_tc, mask=tokens < end, other=0)

    # A run without tokens keeps top -inf and total 0: out 0, lse -inf.
    safe = tl.where(total > 0, total, 1.0)
    norm = (top + tl.log2(safe)) * 0.6931471805599453
    tl.store(lse_ptr + l_heads, norm, mask=in_heads)
    out = (acc * (1.0 / safe)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o_heads[:, None] + d[None, :], out, mask=out_mask)
