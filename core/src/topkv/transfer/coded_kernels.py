"""Triton kernels between the device's entries and coded ones (``topkv.kv.host_format``).

Each stands in the place of the kernel of its name in ``kernels`` or ``token_kernels``, and takes
what that takes; of host memory it sees bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from topkv.kv.row_kernels import decode_rows, encode_rows
from topkv.transfer.kernels import place_in_lines


@triton.jit
def load_kernel(
    p_pool,
    p_buffer,
    p_step_slots,
    p_miss_hosts,
    p_miss_slots,
    p_misses,
    s_page,
    s_head,
    s_unit,
    LANE_HEADS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (lanes, splits). As ``kernels.load_kernel``, in words of WIDTH codes, of which an entry
    has WORDS and a row ROW_WORDS. Strides in 16 bytes.
    """
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_step_slots + lane // LANE_HEADS).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    head = lane % LANE_HEADS
    lane_row = slot * LANE_HEADS + head
    p_miss_hosts += lane * K
    p_miss_slots += lane * K
    code = tl.arange(0, WIDTH)
    step = tl.num_programs(1) * BLOCK
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    host = tl.load(p_miss_hosts + i // SPAN, i < K * SPAN, other=-1)
    target = tl.load(p_miss_slots + i // SPAN, i < K * SPAN, other=-1)
    total = tl.load(p_misses + lane) * SPAN
    for _ in range(tl.program_id(1) * BLOCK, total, step):
        entry = (host // UNITS_PER_PAGE).to(tl.int64) * s_page + head * s_head
        entry += (host % UNITS_PER_PAGE).to(tl.int64) * s_unit
        p_entry = p_pool + entry * 16
        inner = place_in_lines(p_entry, i, SPAN, WORDS, WIDTH)
        live = (host >= 0) & (inner >= 0) & (inner < WORDS)
        codes = tl.load(
            (p_entry + inner * WIDTH)[:, None] + code[None, :],
            live[:, None],
            other=0,
            cache_modifier=".cg",
        )
        p_exponents = p_entry + WORDS * WIDTH + inner // ROW_WORDS
        # All warps of a program read the same few: the link is asked once, and the L1 cache then.
        exponents = tl.load(p_exponents, live, other=0, cache_modifier=".ca")
        place = (lane_row * SLOTS + target) * WORDS + inner
        i += step
        host = tl.load(p_miss_hosts + i // SPAN, i < K * SPAN, other=-1)
        target = tl.load(p_miss_slots + i // SPAN, i < K * SPAN, other=-1)
        data = decode_rows(codes, exponents[:, None], p_buffer.dtype.element_ty)
        tl.store(p_buffer + (place * WIDTH)[:, None] + code[None, :], data, live[:, None])


@triton.jit
def offload_kernel(
    p_pool,
    p_buffer,
    p_page_table,
    p_step_slots,
    p_lengths,
    p_high,
    p_appended,
    p_resident,
    p_unit_slot,
    p_slot_unit,
    s_page,
    s_layer,
    s_head,
    s_unit,
    s_buffer_layer,
    s_map_layer,
    s_slot_layer,
    max_pages,
    max_units,
    FORCE: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (lanes, layers). As ``kernels.offload_kernel``, ROWS rows of D elements an entry.
    Strides of host memory in 16 bytes, others in elements.
    """
    lane, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    batch, head = lane // LANE_HEADS, lane % LANE_HEADS
    slot = tl.load(p_step_slots + batch).to(tl.int64)
    length = tl.load(p_lengths + batch)
    closes = (tl.load(p_appended + batch) != 0) & (length % UNIT == 0)
    if (slot >= 0) & (length > 0) & (closes | FORCE):
        lane_row = slot * LANE_HEADS + head
        unit = (length - 1) // UNIT
        fits = (tl.load(p_resident + batch) != 0) & ((tl.load(p_high + batch) - 1) // UNIT <= C)
        p_map = p_unit_slot + layer * s_map_layer + lane_row * max_units + unit
        place = tl.load(p_map)
        if fits & (unit < C):
            tl.store(p_map, unit)
            tl.store(p_slot_unit + layer * s_slot_layer + lane_row * C + unit, unit)
            place = unit
        page = tl.load(p_page_table + slot * max_pages + unit // UNITS_PER_PAGE).to(tl.int64)
        inner_unit = (unit % UNITS_PER_PAGE).to(tl.int64)
        host = page * s_page + layer * s_layer + head * s_head + inner_unit * s_unit
        p_host = p_pool + host * 16
        p_row = p_buffer + layer * s_buffer_layer + lane_row * (C + T) * (ROWS * D)
        p_ring = p_row + (C + unit % T).to(tl.int64) * (ROWS * D)
        p_lru = p_row + place.to(tl.int64) * (ROWS * D)
        d = tl.arange(0, BLOCK_D)[None, :]
        for begin in range(0, ROWS, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            live = (row < ROWS)[:, None] & (d < D)
            at = row[:, None] * D + d
            data = tl.load(p_ring + at, live, other=0.0)
            codes, exponents = encode_rows(data.to(tl.float32), LEAST, MOST)
            tl.store(p_host + at, codes, live)
            tl.store(p_host + ROWS * D + row, exponents, row < ROWS)
            if place >= 0:
                tl.store(p_lru + at, data, live)


@triton.jit
def _store_coded(
    p_entry,
    row,
    d,
    x,
    live,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Rows of tokens to coded entries, as the rows of these numbers."""
    codes, exponents = encode_rows(x.to(tl.float32), LEAST, MOST)
    both = live[:, None] & (d < D)[None, :]
    tl.store((p_entry + row * D)[:, None] + d[None, :], codes, both)
    tl.store(p_entry + ROWS * D + row, exponents, live)


@triton.jit
def _store_planes(p_entry, d, k, v, mask, plane):
    """Keys to their entries, and values a ``plane`` further on."""
    tl.store(p_entry[:, None] + d[None, :], k, mask)
    tl.store((p_entry + plane)[:, None] + d[None, :], v, mask)


@triton.jit
def store_kernel(
    p_k,
    p_v,
    p_pool,
    p_buffer,
    p_page_row,
    p_unit_slot,
    p_slot_unit,
    first_lane_row,
    start,
    tokens,
    low,
    claim_below,
    s_k,
    s_v,
    s_page,
    s_head,
    s_unit,
    max_units,
    SPARSE: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (token blocks, Hkv): a prefill chunk to its pages, coded, and to ring and LRU slots.

    As ``token_kernels.store_kernel``, for sparse groups of two planes; strides of host memory in
    bytes.
    """
    ROWS: tl.constexpr = HEADS_PER_LANE * PLANES * UNIT
    kv_head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = i < tokens
    position = start + i
    unit = position // UNIT
    d = tl.arange(0, BLOCK_D)
    both = live[:, None] & (d < D)[None, :]
    k = tl.load(p_k + (i * s_k + kv_head * D)[:, None] + d[None, :], both, other=0.0)
    v = tl.load(p_v + (i * s_v + kv_head * D)[:, None] + d[None, :], both, other=0.0)
    row = (kv_head % HEADS_PER_LANE) * (PLANES * UNIT) + position % UNIT

    lane_head = kv_head // HEADS_PER_LANE
    page = tl.load(p_page_row + unit // UNITS_PER_PAGE, live, other=0).to(tl.int64)
    p_entry = p_pool + page * s_page + lane_head * s_head + (unit % UNITS_PER_PAGE) * s_unit
    _store_coded(p_entry, row, d, k, live, ROWS, D, LEAST, MOST)
    _store_coded(p_entry, row + UNIT, d, v, live, ROWS, D, LEAST, MOST)

    lane_row = first_lane_row + lane_head
    p_buffer += lane_row * (C + T) * (ROWS * D)
    in_ring = both & (unit >= low)[:, None]
    entry = (C + unit % T) * (ROWS * D) + row * D
    _store_planes(p_buffer + entry, d, k, v, in_ring, UNIT * D)

    claims = live & (unit < claim_below)
    mapped = tl.load(p_unit_slot + lane_row * max_units + unit, live, other=-1).to(tl.int64)
    place = tl.where(claims, unit, mapped)
    tl.store(p_unit_slot + lane_row * max_units + unit, unit.to(tl.int32), claims)
    tl.store(p_slot_unit + lane_row * C + unit, unit.to(tl.int32), claims)
    in_lru = both & (place >= 0)[:, None]
    _store_planes(p_buffer + place * (ROWS * D) + row * D, d, k, v, in_lru, UNIT * D)


@triton.jit
def fetch_kernel(
    p_k,
    p_v,
    p_pool,
    p_page_row,
    start,
    tokens,
    s_page,
    s_head,
    s_unit,
    KV_HEADS: tl.constexpr,
    HEADS_PER_LANE: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (programs): history from its pages to packed ``[tokens, Hkv, D]``. The programs share
    the blocks of tokens of all heads, first keys and then values. Strides of host memory in bytes.
    """
    ROWS: tl.constexpr = HEADS_PER_LANE * PLANES * UNIT
    d = tl.arange(0, BLOCK_D)[None, :]
    tile, step = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(tokens, BLOCK_T) * (KV_HEADS * PLANES)
    for _ in range(tl.program_id(0), tiles, step):
        plane = tile // KV_HEADS % PLANES
        kv_head = (tile % KV_HEADS).to(tl.int64)
        i = (tile // (KV_HEADS * PLANES)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = i < tokens
        position = start + i
        unit = position // UNIT
        both = live[:, None] & (d < D)
        page = tl.load(p_page_row + unit // UNITS_PER_PAGE, live, other=0).to(tl.int64)
        p_entry = p_pool + page * s_page + (kv_head // HEADS_PER_LANE) * s_head
        p_entry += (unit % UNITS_PER_PAGE) * s_unit
        row = ((kv_head % HEADS_PER_LANE) * PLANES + plane) * UNIT + position % UNIT
        codes = tl.load((p_entry + row * D)[:, None] + d, both, other=0, cache_modifier=".cg")
        exponents = tl.load(p_entry + ROWS * D + row, live, other=0, cache_modifier=".cg")
        data = decode_rows(codes, exponents[:, None], p_k.dtype.element_ty)
        packed = ((i * KV_HEADS + kv_head) * D)[:, None] + d
        if plane == 0:
            tl.store(p_k + packed, data, both)
        else:
            tl.store(p_v + packed, data, both)
        tile += step
