"""Triton kernels of the transfer engine: places of units, and copies of the misses.

Each has its counterpart in ``reference.py``. Names: ``p_`` pointers, ``s_`` strides. Address
arithmetic is 64 bit: lane rows times slots times entry bytes soon exceed 2**31.
"""

from __future__ import annotations

import triton
import triton.language as tl

CLAIM = tl.constexpr(1 << 30)
UNSELECTED = tl.constexpr(2**31 - 1)


@triton.jit
def lru_new_position(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    """Return the order [stale | loaded in selection order | hits in their previous order]."""
    loaded = stale & (stale_rank < misses)
    kept = tl.where(stale, stale_rank - misses, stale_count + hit_rank)
    return tl.where(loaded, stale_count - misses + stale_rank, kept)


@triton.jit
def write_counts(p_slots, p_miss_hosts, p_miss_slots, p_count, p_misses, k, in_k, count, misses):
    """Write the counts, and -1 behind them in the lists."""
    tl.store(p_count, count)
    tl.store(p_misses, misses)
    tl.store(p_slots + k, -1, in_k & (k >= count))
    tl.store(p_miss_hosts + k, -1, in_k & (k >= misses))
    tl.store(p_miss_slots + k, -1, in_k & (k >= misses))


@triton.jit
def first_of_equals(p_stamp, p_unit_slot, k, held, unit, present, absent):
    """Return True for the first of equal ids, whatever the order in which threads run.

    A unit that is present is claimed through its slot's stamp, which also marks the slot as hit;
    one that is absent through the inverse map itself, by numbers far below every slot.
    """
    tl.atomic_min(p_stamp + held, k, mask=present, sem="relaxed", scope="cta")
    tl.atomic_min(p_unit_slot + unit, k - CLAIM, mask=absent, sem="relaxed", scope="cta")
    tl.debug_barrier()
    claimed = tl.load(p_unit_slot + unit, absent, other=0) + CLAIM
    stamped = tl.load(p_stamp + held, present, other=-1)
    return tl.where(absent, claimed, stamped) == k


@triton.jit
def place_missed(p_slots, p_unit_slot, p_slot_unit, p_miss_slots, unit, rank, miss_rank, missed):
    """Enter the missed units under the slots of their victims."""
    loaded = tl.load(p_miss_slots + miss_rank, missed, other=-1)
    tl.store(p_slots + rank, loaded, missed)
    tl.store(p_unit_slot + unit, loaded, missed)
    tl.store(p_slot_unit + loaded, unit, missed)


@triton.jit
def plan_kernel(
    p_ids,
    p_limit,
    p_step_slots,
    p_high,
    p_resident,
    p_page_table,
    p_unit_slot,
    p_slot_unit,
    p_order,
    p_state,
    p_stamp,
    p_counters,
    p_slots,
    p_count,
    p_miss_hosts,
    p_miss_slots,
    p_misses,
    max_pages,
    max_units,
    NEW_POSITION: tl.constexpr,
    NEW_STATE: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Plan, one program per lane; see ``ReferenceTransfer.plan``.

    A step is a chain of dependent reads, each a few hundred nanoseconds, so what does not depend
    on the chain is read first, and two counts share one scan.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    batch = lane // LANE_HEADS
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    c = tl.arange(0, BLOCK_C)
    in_c = c < C
    p_slots += lane * K
    p_miss_hosts += lane * K
    p_miss_slots += lane * K
    p_count += lane
    p_misses += lane

    slot = tl.load(p_step_slots + batch).to(tl.int64)
    unit = tl.load(p_ids + lane * K + k, in_k, other=-1)
    limit = tl.load(p_limit + batch)
    newest = (tl.load(p_high + batch) - 1) // UNIT
    fits = (tl.load(p_resident + batch) != 0) & (newest <= C)
    if slot < 0:
        write_counts(p_slots, p_miss_hosts, p_miss_slots, p_count, p_misses, k, in_k, 0, 0)
        return

    lane_row = slot * LANE_HEADS + lane % LANE_HEADS
    p_unit_slot += lane_row * max_units
    p_slot_unit += lane_row * C
    p_order += lane_row * C
    p_state += lane_row * C
    p_stamp += lane_row * (C + T)
    p_counters += lane_row * 2

    # Where is each id now? Ring units are found by arithmetic, the others in the inverse map.
    valid = in_k & (unit >= 0) & (unit < limit)
    in_ring = valid & (unit >= newest - T + 1)
    mapped = tl.load(p_unit_slot + unit, valid & (unit < newest - T + 1), other=-1)
    at = tl.load(p_order + c, in_c, other=0)
    hits_before = tl.load(p_counters)
    misses_before = tl.load(p_counters + 1)
    held = tl.where(in_ring, C + unit % T, mapped)
    present = valid & (held >= 0)
    absent = valid & (held < 0)

    occupant = tl.load(p_slot_unit + at, in_c, other=-1)
    page = tl.load(p_page_table + slot * max_pages + unit // UNITS_PER_PAGE, absent, other=0)
    first = (present | absent) & first_of_equals(
        p_stamp, p_unit_slot, k, held, unit, present, absent
    )
    stale = in_c & (tl.load(p_stamp + at, in_c, other=0) == UNSELECTED)
    missed = first & absent
    pair = first.to(tl.int32) + (missed.to(tl.int32) << 16)
    rank = tl.cumsum(pair, 0) - pair
    total = tl.sum(pair, 0)
    miss_rank = rank >> 16
    rank = rank & 0xFFFF
    misses = total >> 16
    count = total & 0xFFFF

    write_counts(p_slots, p_miss_hosts, p_miss_slots, p_count, p_misses, k, in_k, count, misses)
    tl.store(p_counters, hits_before + (count - misses))
    tl.store(p_counters + 1, misses_before + misses)
    tl.store(p_slots + rank, held, first & present)
    tl.store(p_miss_hosts + miss_rank, page * UNITS_PER_PAGE + unit % UNITS_PER_PAGE, missed)
    tl.debug_barrier()
    tl.store(p_stamp + held, UNSELECTED, present)
    if fits:
        return

    # Victims and the new order, from one pass over the old order.
    stale_rank = tl.cumsum(stale.to(tl.int32), 0)
    stale_count = tl.max(stale_rank, 0)
    stale_rank -= stale.to(tl.int32)
    state = tl.zeros_like(c)
    if NEW_STATE is not None:
        state = tl.load(p_state + c, in_c, other=0)
        state = NEW_STATE(state, stale, stale_rank, misses, C)
    target = NEW_POSITION(c, stale, stale_rank, c - stale_rank, stale_count, misses, C, state)
    # A policy that is no permutation must not write to another lane's order.
    in_lane = in_c & (target >= 0) & (target < C)
    tl.debug_barrier()
    tl.store(p_order + target, at, in_lane)
    if NEW_STATE is not None:
        tl.store(p_state + target, state, in_lane)
    if misses > 0:
        victim = stale & (stale_rank < misses)
        tl.store(p_miss_slots + stale_rank, at, victim)
        tl.debug_barrier()
        place_missed(
            p_slots, p_unit_slot, p_slot_unit, p_miss_slots, unit, rank, miss_rank, missed
        )
        tl.store(p_unit_slot + occupant, -1, victim & (occupant >= 0))


@triton.jit
def place_in_lines(p_entry, i, SPAN: tl.constexpr, WORDS: tl.constexpr, BYTES: tl.constexpr):
    """Return the word of an entry at the i-th of SPAN places; for none below 0 or WORDS and above.

    The link moves lines of 128 bytes, and warps that share one ask for it twice. So where entries
    begin within a line, they are walked from its beginning on.
    """
    if SPAN == WORDS:
        inner = (i % SPAN).to(tl.int64)
    else:
        inner = i % SPAN - p_entry.to(tl.int64) % 128 // BYTES
    return inner


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
    READ: tl.constexpr,
    DECODE: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Load missed entries. Grid (lanes, splits).

    Threads of the GPU walk the missed entries laid end to end, a word of WIDTH elements each, so
    that short entries use the link as well as long ones. An entry has WORDS words in SPAN places,
    see ``place_in_lines``. Strides are in 16 bytes, and plain copies are in int32: so the compiler
    sees that every access is aligned.

    PDL (programmatic dependent launch): the programs are in place before the plan has ended, and
    wait for it here. What the plan does not write can be read before.
    """
    ALIGNED: tl.constexpr = 128 // p_pool.dtype.element_ty.primitive_bitwidth
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_step_slots + lane // LANE_HEADS).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    head = lane % LANE_HEADS
    lane_row = slot * LANE_HEADS + head
    p_miss_hosts += lane * K
    p_miss_slots += lane * K
    d = tl.arange(0, WIDTH)
    step = tl.num_programs(1) * BLOCK
    # Reads of host memory take longest and wait for the lists, so those are read one iteration
    # ahead; behind the last miss they hold -1.
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    host = tl.load(p_miss_hosts + i // SPAN, i < K * SPAN, other=-1)
    target = tl.load(p_miss_slots + i // SPAN, i < K * SPAN, other=-1)
    total = tl.load(p_misses + lane) * SPAN
    for _ in range(tl.program_id(1) * BLOCK, total, step):
        entry = (host // UNITS_PER_PAGE).to(tl.int64) * s_page + head * s_head
        entry += (host % UNITS_PER_PAGE).to(tl.int64) * s_unit
        p_entry = p_pool + entry * ALIGNED
        inner = place_in_lines(p_entry, i, SPAN, WORDS, 16 * WIDTH // ALIGNED)
        live = (host >= 0) & (inner >= 0) & (inner < WORDS)
        data = READ(p_entry, inner * WIDTH, d, live, live[:, None], WORDS * WIDTH, D)
        place, at = (lane_row * SLOTS + target) * WORDS + inner, inner * WIDTH
        i += step
        host = tl.load(p_miss_hosts + i // SPAN, i < K * SPAN, other=-1)
        target = tl.load(p_miss_slots + i // SPAN, i < K * SPAN, other=-1)
        data = DECODE(data, at, d, p_buffer.dtype.element_ty, D)
        tl.store(p_buffer + (place * WIDTH)[:, None] + d[None, :], data, live[:, None])


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
    WRITE: tl.constexpr,
    FORCE: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the units that the step filled from the ring to the host, and to LRU slots if any.

    Grid (lanes, layers, units that a row may fill). A unit is ROWS rows of D elements. FORCE moves
    the open unit, filled or not. Strides of host memory in 16 bytes, ``s_buffer_layer`` in rows.
    """
    ALIGNED: tl.constexpr = 128 // p_pool.dtype.element_ty.primitive_bitwidth
    lane = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    batch = lane // LANE_HEADS
    head = lane % LANE_HEADS
    slot = tl.load(p_step_slots + batch).to(tl.int64)
    length = tl.load(p_lengths + batch)
    unit = (length - tl.load(p_appended + batch)) // UNIT + tl.program_id(2)
    closes = unit < length // UNIT
    if FORCE:
        unit = (length - 1) // UNIT
    if (slot >= 0) & (length > 0) & (closes | FORCE):
        lane_row = slot * LANE_HEADS + head
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
        p_host = p_pool + host * ALIGNED
        p_row = p_buffer + (layer * s_buffer_layer + lane_row * (C + T) * ROWS) * D
        p_ring = p_row + (C + unit % T).to(tl.int64) * (ROWS * D)
        p_lru = p_row + place.to(tl.int64) * (ROWS * D)
        d = tl.arange(0, BLOCK_D)
        for begin in range(0, ROWS, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            live = row < ROWS
            both = live[:, None] & (d < D)[None, :]
            at = row[:, None] * D + d[None, :]
            data = tl.load(p_ring + at, both, other=0)
            WRITE(p_host, row * D, d, data, live, both, ROWS * D, D)
            if place >= 0:
                tl.store(p_lru + at, data, both)
