"""What Quest keeps, in Triton, beside ``reference.encode`` and ``reference.minmax``.

Names: ``p_`` pointers, ``s_`` strides in elements. Pools are addressed by host id in 64 bit.
``METADATA`` is 0 where bounds are stored as they are, 1 for bfloat16, 2 for int8. Keys and
bounds in bfloat16 are moved as 16-bit integers, which keeps subnormals on every device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bf16_up(x):
    bits = x.to(tl.int32, bitcast=True)
    whole = bits & -65536
    bits = tl.where((bits > 0) & (whole != bits), whole + 65536, whole)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_scale(amax):
    first = _bf16_up(tl.div_rn(amax, 127.0))
    bits = first.to(tl.int32, bitcast=True)
    above = (bits + 65536).to(tl.float32, bitcast=True)
    below = (bits - 65536).to(tl.float32, bitcast=True)
    scale = tl.where(127.0 * first >= amax, first, above)
    return tl.where((bits > 0) & (127.0 * below >= amax), below, scale)


@triton.jit
def _steps(x, scale):
    n = tl.ceil(tl.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x)))
    n = tl.where(n * scale < x, n + 1, n)
    n = tl.where((n - 1) * scale >= x, n - 1, n)
    return tl.where(scale > 0, n, 0.0)


@triton.jit
def _bf16_bits(x):
    """int16 bits of fp32 values that bfloat16 holds exactly."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def _write_unit(
    p_k,
    s_token,
    tokens,
    p_bounds,
    p_scale,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BF16: tl.constexpr,
    METADATA: tl.constexpr,
):
    """Bounds of the first ``tokens`` keys at ``p_k``; the others are not read."""
    t = tl.arange(0, BLOCK_T)[:, None]
    d = tl.arange(0, BLOCK_D)
    valid = (t < tokens) & (d < D)[None, :]
    raw = tl.load(p_k + t.to(tl.int64) * s_token + d[None, :], valid, other=0)
    if KEY_BF16:
        keys = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        keys = raw.to(tl.float32)
    in_d = d < D
    low = tl.where(in_d, tl.min(tl.where(valid, keys, float("inf")), 0) + 0.0, 0.0)
    high = tl.where(in_d, tl.max(tl.where(valid, keys, float("-inf")), 0) + 0.0, 0.0)
    if METADATA == 2:
        amax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)
        scale = _bf16_scale(amax)
        tl.store(p_scale, _bf16_bits(scale))
        tl.store(p_bounds + d, (-_steps(-low, scale)).to(tl.int32).to(tl.int8), in_d)
        tl.store(p_bounds + D + d, _steps(high, scale).to(tl.int32).to(tl.int8), in_d)
    elif METADATA == 1:
        tl.store(p_bounds + d, _bf16_bits(-_bf16_up(-low)), in_d)
        tl.store(p_bounds + D + d, _bf16_bits(_bf16_up(high)), in_d)
    else:
        tl.store(p_bounds + d, low, in_d)
        tl.store(p_bounds + D + d, high, in_d)


@triton.jit(do_not_specialize=["first_unit", "tokens"], do_not_specialize_on_alignment=["p_pages"])
def construct_kernel(
    p_k,
    p_bounds,
    p_scale,
    p_pages,
    first_unit,
    tokens,
    s_token,
    s_head,
    KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BF16: tl.constexpr,
    METADATA: tl.constexpr,
):
    """Program (unit of the chunk, kv-head); ``p_pages`` is the page row of the request."""
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    unit = first_unit + nth
    page = tl.load(p_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    _write_unit(
        p_k + nth * UNIT * s_token + head * s_head,
        s_token,
        tl.minimum(tokens - nth * UNIT, UNIT),
        p_bounds + at * (2 * D),
        p_scale + at,
        D,
        BLOCK_T,
        BLOCK_D,
        KEY_BF16,
        METADATA,
    )


@triton.jit
def update_kernel(
    p_ring,
    p_bounds,
    p_scale,
    p_slots,
    p_lengths,
    p_appended,
    p_pages,
    max_pages,
    s_slot,
    s_lane,
    s_unit,
    s_head,
    s_token,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    T: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BF16: tl.constexpr,
    METADATA: tl.constexpr,
):
    """Program (row, kv-head): recompute the open unit from the ring."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    newest = tl.load(p_lengths + row) - 1
    if (slot < 0) | (newest < 0) | (tl.load(p_appended + row) == 0):
        return
    unit = newest // UNIT
    page = tl.load(p_pages + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
    at = (page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE) * KV_HEADS + head
    p_ring += slot * s_slot + (head // HEADS_PER_LANE) * s_lane
    p_ring += (unit % T).to(tl.int64) * s_unit + (head % HEADS_PER_LANE) * s_head
    _write_unit(
        p_ring,
        s_token,
        newest % UNIT + 1,
        p_bounds + at * (2 * D),
        p_scale + at,
        D,
        BLOCK_T,
        BLOCK_D,
        KEY_BF16,
        METADATA,
    )
