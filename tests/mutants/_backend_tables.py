"""Backends with one bug each in ``adapt_page_table``."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_triton_attention.backend import TritonAttention


def _rows(layer):
    """Slot and kv-head of each lane, int32 ``[N]`` each."""
    heads, slots = layer.group.lane_heads, layer.step.slots
    head = torch.arange(heads, device=slots.device, dtype=torch.int32)
    return slots.repeat_interleave(heads), head.repeat(len(slots))


def _used(table, lengths, unit):
    columns = torch.arange(table.shape[1], device=table.device)
    return columns * unit < lengths[:, None]


class TailAtK(TritonAttention):
    """The tail stands in the last column of the table instead of behind the selection."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table, lengths = tables.table, tables.lengths
        super().adapt_page_table(layer, plan, tables)
        for lane, count in enumerate(plan.count.tolist()):
            if lengths[lane] and table.shape[1] > plan.slots.shape[1]:
                tail = int(table[lane, count])
                table[lane, count] = 0
                table[lane, -1] = tail


class OneUnitOfSeveral(TritonAttention):
    """The tail alone stands behind the selection, of all units that several queries are in."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        columns = plan.slots.shape[1] + 1
        tables.table[:, columns:] = 0
        super().adapt_page_table(
            layer, plan, evolve(tables, table=tables.table[:, :columns], queries=None)
        )


class NewestTokenForgotten(TritonAttention):
    """``lengths`` ends before the token that this step appends."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        lengths = tables.lengths
        super().adapt_page_table(layer, plan, tables)
        lengths.copy_((lengths - 1).clamp_min(0))


class HeadMajorRows(TritonAttention):
    """Row of a lane = head * max_requests + slot: the rows of another order."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table, lengths = tables.table, tables.lengths
        super().adapt_page_table(layer, plan, tables)
        slot, head = _rows(layer)
        group = layer.group
        shift = head * group.max_requests + slot - (slot * group.lane_heads + head)
        used = _used(table, lengths, group.unit)
        table.copy_(torch.where(used, table + (shift * group.slots)[:, None], table))


class RowsWithoutTheRing(TritonAttention):
    """Rows are C slots apart, where they are C + T."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table, lengths = tables.table, tables.lengths
        super().adapt_page_table(layer, plan, tables)
        slot, head = _rows(layer)
        shift = (slot * layer.group.lane_heads + head) * layer.group.ring_slots
        used = _used(table, lengths, layer.group.unit)
        table.copy_(torch.where(used, table - shift[:, None], table))


class HostIdsInTheTable(TritonAttention):
    """The host ids of the plan are taken for slot ids."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        wrong = evolve(plan, slots=plan.miss_hosts)
        super().adapt_page_table(layer, wrong, tables)


class PaddingKeepsItsLength(TritonAttention):
    """A padded row is skipped, and keeps the length of the step before."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        lengths = tables.lengths
        fresh = torch.empty_like(lengths)
        super().adapt_page_table(layer, plan, evolve(tables, lengths=fresh))
        slot, _ = _rows(layer)
        lengths.copy_(torch.where(slot < 0, lengths, fresh))


class NegativeBehindTheLastColumn(TritonAttention):
    """Unused columns are -1, an address before the buffer for a kernel that reads ahead."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table, lengths = tables.table, tables.lengths
        super().adapt_page_table(layer, plan, tables)
        table.masked_fill_(~_used(table, lengths, layer.group.unit), -1)


class TailAlwaysAppended(TritonAttention):
    """The tail is put into the last column even where the algorithm lets it compete."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table = tables.table
        super().adapt_page_table(layer, plan, tables)
        if table.shape[1] == plan.slots.shape[1]:
            slot, head = _rows(layer)
            group, newest = (
                layer.group,
                layer.step.lengths.repeat_interleave(layer.group.lane_heads),
            )
            row = slot * group.lane_heads + head
            ring = group.buffer_slots + (newest - 1) % group.ring_slots
            table[:, -1] = torch.where(slot < 0, table[:, -1], row * group.slots + ring)


class ThousandColumns(TritonAttention):
    """Columns from 1024 on are not written."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table = tables.table
        before = table.clone()
        super().adapt_page_table(layer, plan, tables)
        table[:, 1024:] = before[:, 1024:]


class FirstPlanKept(TritonAttention):
    """The table of a batch is made once, and returned for every plan that follows."""

    @hookimpl
    def adapt_page_table(self, layer, plan, tables):
        table, lengths = tables.table, tables.lengths
        super().adapt_page_table(layer, plan, tables)
        self.kept = getattr(self, "kept", {})
        first = self.kept.setdefault(table.shape, (table.clone(), lengths.clone()))
        table.copy_(first[0])
        lengths.copy_(first[1])
