"""Backends with one bug each in ``attend``."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_testing.doubles import Gather
from topkv_triton_attention.backend import TritonAttention


def _each(x, tables):
    """Lanes of a request, where ``x`` has a row for each request."""
    return len(tables.table) // max(1, len(x))


def _lanes(x, tables):
    """``[B, lanes of a request, Q, heads of a lane, ...]``, a view of ``[B, Q, H, ...]``."""
    return x.unflatten(2, (_each(x, tables), -1)).transpose(1, 2)


def _empty(x, tables):
    """bool ``[B, lanes of a request]``"""
    return (tables.lengths == 0).view(len(x), _each(x, tables))


class PartialUnitFirst(TritonAttention):
    """The partly filled unit is read as the first of the table, and the last one as full."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        wrong = tables.table.clone()
        for lane, length in enumerate(tables.lengths.tolist()):
            used = -(-length // k.shape[2])
            wrong[lane, :used] = wrong[lane, :used].flip(0)
        super().attend(q, k, v, evolve(tables, table=wrong), out, lse)


class UnitsSorted(TritonAttention):
    """Units are read by ascending address, the partly filled one too."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        wrong = tables.table.clone()
        for lane, length in enumerate(tables.lengths.tolist()):
            used = -(-length // k.shape[2])
            wrong[lane, :used] = wrong[lane, :used].sort().values
        super().attend(q, k, v, evolve(tables, table=wrong), out, lse)


class TableOfTheFirstHead(TritonAttention):
    """Every kv-head of a request reads the table of its first one."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        heads, table = _each(q, tables), tables.table
        wrong = table.view(len(q), heads, table.shape[1])[:, :1].expand(-1, heads, -1)
        wrong = wrong.reshape(table.shape).clamp(0, len(k) - 1)
        super().attend(q, k, v, evolve(tables, table=wrong), out, lse)


class LanesByLengthKeptSorted(TritonAttention):
    """Rows are sorted by length to balance the work, and the results left in that order."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        shape = (len(q), _each(q, tables))
        order = tables.lengths.view(shape)[:, 0].argsort(descending=True)
        table, lengths = (
            x.unflatten(0, shape)[order].flatten(0, 1) for x in (tables.table, tables.lengths)
        )
        super().attend(q[order], k, v, evolve(tables, table=table, lengths=lengths), out, lse)


class FirstTableKept(TritonAttention):
    """The table of a shape is taken to be that of the first call, as a stale plan would."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        self.kept = getattr(self, "kept", {})
        table = tables.table
        kept = self.kept.setdefault(table.shape, table.clone()).clamp(0, len(k) - 1)
        super().attend(q, k, v, evolve(tables, table=kept), out, lse)


class LogsOfBaseTwo(TritonAttention):
    """The log-sum-exp is to base 2, as FlashInfer gives it."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        lse.div_(math.log(2))


class EmptyLaneNaN(TritonAttention):
    """An empty lane is 0 / 0."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        _lanes(out, tables)[_empty(q, tables)] = torch.nan


class EmptyLaneOfPositiveInfinity(TritonAttention):
    """The log-sum-exp of an empty lane is +inf, as FlashAttention-2 and FlashMLA give it."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        _lanes(lse, tables)[_empty(q, tables)] = torch.inf


class EmptyLaneUnwritten(TritonAttention):
    """An empty lane is skipped, and keeps what the buffers held."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        before, before_lse = out.clone(), lse.clone()
        super().attend(q, k, v, tables, out, lse)
        empty = _empty(q, tables)
        for mine, kept in ((out, before), (lse, before_lse)):
            _lanes(mine, tables)[empty] = _lanes(kept, tables)[empty]


class ScaleOfItsOwn(TritonAttention):
    """Logits are scaled by ``D ** -0.5``, whatever the model says."""

    def __init__(self, setup):
        own = evolve(setup.model, scale=setup.model.head_dim**-0.5)
        super().__init__(evolve(setup, model=own))


class HeadsInterleaved(TritonAttention):
    """Query head h reads kv-head ``h % Hkv`` instead of ``h // G``."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        order = torch.arange(q.shape[2], device=q.device).view(_each(q, tables), -1, k.shape[1])
        order = order.transpose(1, 2).flatten()
        mine, mine_lse = torch.empty_like(out), torch.empty_like(lse)
        super().attend(q[:, :, order], k, v, tables, mine, mine_lse)
        out[:, :, order], lse[:, :, order] = mine, mine_lse


class WritesPastTheBatch(TritonAttention):
    """One more row of results than there are lanes is written."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        end = out.storage_offset() + (len(out) - 1) * out.stride(0) + out[0].numel()
        out.as_strided((q.shape[-1],), (1,), end).zero_()


class ScalesQueriesInPlace(TritonAttention):
    """The scale is folded into the caller's own queries."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        q.mul_(0.5)


class MasksByMultiplying(Gather):
    """Whole units are read, and what is behind the length is given weight 0: NaN * 0."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        super().attend(q, k, v, tables, out, lse)
        for lane, length in enumerate(tables.lengths.tolist()):
            used = tables.table[lane, : -(-length // k.shape[2])].long()
            units = v[used].transpose(1, 2).flatten(0, 1)
            mine = _lanes(out, tables)[divmod(lane, _each(q, tables))]
            mine += (0 * units[length:]).sum().to(out.dtype)


class SoftmaxWithoutMaximum(Gather):
    """``exp`` of the logits as they are."""

    @hookimpl
    def attend(self, q, k, v, tables, out, lse):
        for lane, length in enumerate(tables.lengths.tolist()):
            place = divmod(lane, _each(q, tables))
            queries, sums, outs = (_lanes(x, tables)[place][0] for x in (q, lse, out))
            used = tables.table[lane, : -(-length // k.shape[2])].long()
            keys, values = (
                pool[used].transpose(1, 2).flatten(0, 1)[:length].float() for pool in (k, v)
            )
            group = len(queries) // k.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            logits = torch.einsum("hd,nhd->hn", queries.float(), keys) * self.model.scale
            weights = logits.exp()
            total = weights.sum(-1)
            sums.copy_(total.log())
            mean = torch.einsum("hn,nhd->hd", weights, values) / total.clamp_min(1e-30)[:, None]
            outs.copy_(mean)
