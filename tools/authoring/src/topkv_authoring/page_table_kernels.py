"""The kernel of ``page_table``; its reference stands there."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from topkv.types import LayerView, Plan, Tables
from topkv_authoring.page_table import Listing

MAX_BLOCK = 1024


def adapt(layer: LayerView, plan: Plan, tables: Tables, listing: Listing | None) -> None:
    """Launches."""
    table, lengths, queries = tables.table, tables.lengths, tables.queries
    group, (lanes, width) = layer.group, table.shape
    if not lanes:
        return
    other = listing or Listing(table)
    columns = other.ids.shape[1]
    block = min(MAX_BLOCK, triton.next_power_of_2(columns))
    adapt_kernel[(lanes, triton.cdiv(columns, block))](
        *(plan.slots, plan.count, layer.step.slots, layer.step.lengths),
        *(layer.step.lengths if queries is None else queries, table, lengths),
        *(other.ids, lengths if other.last is None else other.last, width, columns),
        *(plan.slots.stride(0), table.stride(0), other.ids.stride(0)),
        LANE_HEADS=group.lane_heads,
        UNIT=group.unit,
        BUFFER=group.buffer_slots,
        RING=group.ring_slots,
        TAIL=width > plan.slots.shape[1],
        SEVERAL=queries is not None,
        LISTED=listing is not None,
        BEHIND=other.behind,
        LAST=other.last is not None,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def adapt_kernel(
    p_slots,
    p_count,
    p_step_slots,
    p_step_lengths,
    p_queries,
    p_table,
    p_lengths,
    p_listed,
    p_last,
    width,
    width_listed,
    s_slots,
    s_table,
    s_listed,
    LANE_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    BUFFER: tl.constexpr,
    RING: tl.constexpr,
    TAIL: tl.constexpr,
    SEVERAL: tl.constexpr,
    LISTED: tl.constexpr,
    BEHIND: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (lanes, blocks of columns). With ``LISTED`` the table is written twice; without
    ``SEVERAL`` rows have one query and ``p_queries`` is not read."""
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(p_step_slots + lane // LANE_HEADS)
    length = tl.load(p_step_lengths + lane // LANE_HEADS)
    live = (request >= 0) & (length > 0)
    count = tl.where(live, tl.load(p_count + lane), 0)
    start = (request * LANE_HEADS + (lane % LANE_HEADS).to(tl.int32)) * (BUFFER + RING)
    used = column < count
    ids = tl.load(p_slots + lane * s_slots + column, mask=used, other=0)
    ids = tl.where(used, start + ids, 0)
    tokens = count * UNIT
    if TAIL:
        newest = tl.maximum(length - 1, 0) // UNIT
        first = newest
        if SEVERAL:
            queries = tl.load(p_queries + lane // LANE_HEADS)
            first = tl.maximum(length - queries, 0) // UNIT
        unit = first + column - count
        appended = (column >= count) & (unit <= newest) & live
        ids = tl.where(appended, start + BUFFER + unit % RING, ids)
        used = used | appended
        tokens = tl.where(live, tokens + length - first * UNIT, 0)
    tl.store(p_table + lane * s_table + column, ids, mask=column < width)
    if LISTED:
        listed = tl.where(used, ids, BEHIND)
        tl.store(p_listed + lane * s_listed + column, listed, mask=column < width_listed)
    if tl.program_id(1) == 0:
        tl.store(p_lengths + lane, tokens)
        if LAST:
            tl.store(p_last + lane, tokens - (width - 1) * UNIT)
