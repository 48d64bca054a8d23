"""Quest with one bug each in what it writes: construct, update, representations."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_authoring.selectors import host_ids
from topkv_quest.quest import Quest, QuestKernels


class RepresentsNextUnit(Quest):
    """Off by one: a unit's bounds go to the row of the unit behind it."""

    def _write(self, layer, slots, units, keys, valid):
        last = self.group.max_units - 1
        super()._write(layer, slots, (units + 1).clamp(max=last), keys, valid)


class Accumulates(Quest):
    """Bounds start from what the row held before instead of from nothing."""

    def _write(self, layer, slots, units, keys, valid):
        writes = slots >= 0
        at = host_ids(layer, slots[writes], units[writes])
        low, high = layer.pools["bounds"][at].float().unbind(-2)
        super()._write(layer, slots, units, keys, valid)
        new = layer.pools["bounds"][at].float()
        low = torch.fmin(low, new[..., 0, :])
        high = torch.fmax(high, new[..., 1, :])
        kept = torch.stack([low, high], -2).to(self.kept)
        layer.pools["bounds"][at] = kept


class UpdateAccumulates(Accumulates):
    """Decode widens the bounds of the open unit, so that rejected tokens stay in them."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        units = start // self.group.unit + torch.arange(-(-len(k) // self.group.unit))
        layer.pools["bounds"][host_ids(layer, slot, units)] = float("nan")
        super().construct(layer, slot, start, k, v, q, lse)


class MeanKeys(Quest):
    """Keeps the mean of a unit's keys instead of their bounds."""

    def _write(self, layer, slots, units, keys, valid):
        weight = valid[..., None, None].float()
        kept = torch.where(weight > 0, keys.float(), 0.0).sum(1, keepdim=True)
        mean = kept / weight.sum(1, keepdim=True)
        super()._write(layer, slots, units, mean, valid.any(1, keepdim=True))


class OtherHead(Quest):
    """Each kv-head writes its bounds where its neighbour's belong."""

    def _write(self, layer, slots, units, keys, valid):
        super()._write(layer, slots, units, keys.roll(1, 2), valid)


class PaddingWrites(Quest):
    """A padded row writes NaN to where slot -1 points: the last request's first unit."""

    @hookimpl
    def update(self, layer, k, v):
        super().update(layer, k, v)
        padded = layer.step.slots[layer.step.slots < 0].long()
        pages = layer.step.page_table[padded, 0].long()
        layer.pools["bounds"][pages * self.group.units_per_page] = float("nan")


class IdleRowsWrite(Quest):
    """Ignores ``appended``: a row that appends nothing writes its open unit, NaN included."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        layer.step = evolve(step, appended=torch.ones_like(step.appended))
        slots = step.slots[(step.slots >= 0) & (step.appended == 0)].long()
        super().update(layer, k, v)
        at = layer.step.page_table[slots, 0].long() * self.group.units_per_page
        layer.pools["bounds"][at] += 1
        layer.step = step


class ForgetsNewest(Quest):
    """Decode represents the open unit without the token that was just appended."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        layer.step = evolve(
            step,
            lengths=(step.lengths - 1).clamp(min=0),
            appended=step.appended * ((step.lengths - 1) % self.group.unit != 0).int(),
        )
        super().update(layer, k, v)
        layer.step = step


class ForgetsOpenTokens(Quest):
    """A chunk that starts in mid-unit represents that unit by the chunk's tokens alone."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        held = len(k) - len(q)
        super().construct(layer, slot, start, k, v, q, lse)
        if held:
            first = torch.cat([k[held : held + 1].expand(held, -1, -1), k[held : self.group.unit]])
            super().construct(layer, slot, start, first, first, q, lse)


class ReadsValues(Quest):
    """Represents values along with keys."""

    @hookimpl
    def update(self, layer, k, v):
        super().update(layer, k, v)
        for slot in layer.step.slots.tolist():
            if slot >= 0:
                tail = layer.ring_v[slot, 0, 0, 0, 0, 0]
                page = layer.step.page_table[slot, 0].long()
                row = page * self.group.units_per_page
                layer.pools["bounds"][row, :, 1] *= torch.where(tail < 0, -1, 1).to(self.kept)


class TailInBounds(Quest):
    """Reads the ring as if the open unit were always full."""

    @hookimpl
    def update(self, layer, k, v):
        step, unit = layer.step, self.group.unit
        full = -(-step.lengths // unit) * unit
        layer.step = evolve(step, lengths=full)
        super().update(layer, k, v)
        layer.step = step


class DependsOnQueries(Quest):
    """Widens the bounds of a prompt by its queries: no longer a function of its keys."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        host = layer.step.page_table[slot, 0].long() * self.group.units_per_page
        layer.pools["bounds"][host, 0, 1] = q[0, 0].to(self.kept)


class KernelForgetsNewest(QuestKernels):
    """The update kernel gets lengths without the token that was just appended."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        layer.step = evolve(step, lengths=(step.lengths - 1).clamp(min=1))
        super().update(layer, k, v)
        layer.step = step


class SyncsHost(Quest):
    """Asks the device for a number in the hot path."""

    @hookimpl
    def update(self, layer, k, v):
        if int(layer.step.lengths.max()) > 0:
            super().update(layer, k, v)
