"""Backends with one bug each in ``attend``."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from topkv import hookimpl
from topkv.testing.doubles import Gather
from topkv_triton_attention.backend import TritonAttention


class PartialUnitFirst(TritonAttention):
    """The partly filled unit is read as the first of the table, and the last one as full."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        wrong = table.clone()
        for lane, length in enumerate(lengths.tolist()):
            used = -(-length // k.shape[2])
            wrong[lane, :used] = table[lane, :used].flip(0)
        super().attend(q, k, v, wrong, lengths, out, lse)


class UnitsSorted(TritonAttention):
    """Units are read by ascending address, the partly filled one too."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        wrong = table.clone()
        for lane, length in enumerate(lengths.tolist()):
            used = -(-length // k.shape[2])
            wrong[lane, :used] = table[lane, :used].sort().values
        super().attend(q, k, v, wrong, lengths, out, lse)


class TableOfTheFirstHead(TritonAttention):
    """Every kv-head of a request reads the table of its first one."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        heads = self.group.lane_heads
        wrong = table.view(-1, heads, table.shape[1])[:, :1].expand(-1, heads, -1)
        wrong = wrong.reshape(table.shape).clamp(0, len(k) - 1)
        super().attend(q, k, v, wrong, lengths, out, lse)


class LanesByLengthKeptSorted(TritonAttention):
    """Lanes are sorted by length to balance the work, and the results left in that order."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        order = lengths.argsort(descending=True)
        super().attend(q[order], k, v, table[order], lengths[order], out, lse)


class FirstTableKept(TritonAttention):
    """The table of a shape is taken to be that of the first call, as a stale plan would."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        self.kept = getattr(self, "kept", {})
        kept = self.kept.setdefault(table.shape, table.clone()).clamp(0, len(k) - 1)
        super().attend(q, k, v, kept, lengths, out, lse)


class LogsOfBaseTwo(TritonAttention):
    """The log-sum-exp is to base 2, as FlashInfer gives it."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        lse.div_(math.log(2))


class EmptyLaneNaN(TritonAttention):
    """An empty lane is 0 / 0."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        out[lengths == 0] = torch.nan


class EmptyLaneOfPositiveInfinity(TritonAttention):
    """The log-sum-exp of an empty lane is +inf, as FlashAttention-2 and FlashMLA give it."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        lse[lengths == 0] = torch.inf


class EmptyLaneUnwritten(TritonAttention):
    """An empty lane is skipped, and keeps what the buffers held."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        before, before_lse = out.clone(), lse.clone()
        super().attend(q, k, v, table, lengths, out, lse)
        out[lengths == 0] = before[lengths == 0]
        lse[lengths == 0] = before_lse[lengths == 0]


class ScaleOfItsOwn(TritonAttention):
    """Logits are scaled by ``D ** -0.5``, whatever the model says."""

    def __init__(self, model, group, impl, device, max_batch):
        own = evolve(model, scale=model.head_dim**-0.5)
        super().__init__(own, group, impl, device, max_batch)


class HeadsInterleaved(TritonAttention):
    """Query head h reads kv-head ``h % Hkv`` instead of ``h // G``."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        kv_heads, heads = k.shape[1], q.shape[2]
        order = torch.arange(heads, device=q.device).view(-1, kv_heads).T.flatten()
        mine, mine_lse = torch.empty_like(out), torch.empty_like(lse)
        super().attend(q[:, :, order], k, v, table, lengths, mine, mine_lse)
        out[:, :, order], lse[:, :, order] = mine, mine_lse


class WritesPastTheBatch(TritonAttention):
    """One more row of results than there are lanes is written."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        out.as_strided((q.shape[-1],), (1,), out.storage_offset() + out.numel()).zero_()


class ScalesQueriesInPlace(TritonAttention):
    """The scale is folded into the caller's own queries."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        q.mul_(self.model.scale)


class MasksByMultiplying(Gather):
    """Whole units are read, and what lies behind the length is given weight 0: NaN * 0."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        super().attend(q, k, v, table, lengths, out, lse)
        for lane, length in enumerate(lengths.tolist()):
            used = table[lane, : -(-length // k.shape[2])].long()
            units = v[used].transpose(1, 2).flatten(0, 1)
            out[lane] += (0 * units[length:]).sum().to(out.dtype)


class SoftmaxWithoutMaximum(Gather):
    """``exp`` of the logits as they are."""

    @hookimpl
    def attend(self, q, k, v, table, lengths, out, lse):
        for lane, length in enumerate(lengths.tolist()):
            used = table[lane, : -(-length // k.shape[2])].long()
            keys, values = (
                pool[used].transpose(1, 2).flatten(0, 1)[:length].float() for pool in (k, v)
            )
            group = q.shape[2] // k.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            logits = torch.einsum("hd,nhd->hn", q[lane, 0].float(), keys) * self.model.scale
            weights = logits.exp()
            total = weights.sum(-1)
            lse[lane, 0] = total.log()
            mean = torch.einsum("hn,nhd->hd", weights, values) / total.clamp_min(1e-30)[:, None]
            out[lane, 0] = mean.to(out.dtype)
