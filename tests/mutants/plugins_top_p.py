"""Top-p with one bug each."""

from __future__ import annotations

import torch

from topkv import hookimpl
from topkv.types import Selection
from topkv_authoring.outliers import split
from topkv_top_p import reference
from topkv_top_p.launch import TopPTriton
from topkv_top_p.stage import TopP


class PrunesToTheMean(TopP):
    """It is enough that the heads of a lane have the share p on average."""

    def logits(self, layer, q, units):
        logits = super().logits(layer, q, units)
        share = logits.logsumexp(-1).softmax(-1).mean(1, keepdim=True)
        return share.log()[..., None].expand(-1, logits.shape[1], -1, 1)


class KeepsTooLittle(TopP):
    """It stops before the share is reached."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        whole, self.p = self.p, self.p if self.p == 1 else self.p * 0.8
        try:
            super().refine(layer, q, candidates, out)
        finally:
            self.p = whole
        return out


class KeepsTooMuch(TopP):
    """It keeps on after the share is reached."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        whole, self.p = self.p, 1 - (1 - self.p) / 2
        try:
            super().refine(layer, q, candidates, out)
        finally:
            self.p = whole
        return out


class UnscaledLogits(TopP):
    """Logits without the model's scale: too sharp a softmax."""

    def logits(self, layer, q, units):
        return super().logits(layer, q, units) / self.model.scale


class BestTokenForUnit(TopP):
    """A unit is worth its best token alone."""

    def logits(self, layer, q, units):
        return super().logits(layer, q, units).amax(-1, keepdim=True)


class _Kept(TopP):
    """Keeps by another function than ``reference.kept``."""

    @staticmethod
    def kept(worth, p, most):
        raise NotImplementedError

    @hookimpl
    def refine(self, layer, q, candidates, out):
        reference.kept, whole = self.kept, reference.kept
        try:
            super().refine(layer, q, candidates, out)
        finally:
            reference.kept = whole
        return out


_kept = reference.kept


class EnoughForOneHead(_Kept):
    """It stops as soon as one query head of a lane has its share."""

    @staticmethod
    def kept(worth, p, most):
        there = worth[:, 0] > float("-inf")
        share = worth.softmax(-1).nan_to_num()
        order = share.amax(1).sort(dim=1, descending=True, stable=True).indices
        ordered = share.gather(2, order[:, None].expand_as(share))
        enough = (ordered.cumsum(-1) - ordered >= p).any(1) & (p < 1)
        enough |= torch.arange(order.shape[1], device=order.device) >= most
        return torch.zeros_like(there).scatter(1, order, ~enough) & there


class HigherOfEquals(_Kept):
    """Keeps the higher unit of equal ranks."""

    @staticmethod
    def kept(worth, p, most):
        return _kept(worth.flip(2), p, most).flip(1)


class StopsBeforeTheShare(_Kept):
    """The unit with which the share is reached is dropped, unless it is the first."""

    @staticmethod
    def kept(worth, p, most):
        keep = _kept(worth, p, most)
        if p == 1:
            return keep
        rank = worth.softmax(-1).amax(1).masked_fill(~keep, torch.inf)
        last = rank.argmin(1, keepdim=True)
        return keep.scatter(1, last, keep.gather(1, last) & (keep.sum(1, keepdim=True) == 1))


class DropsTheWeightless(TopP):
    """With p = 1 candidates without weight are dropped."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        whole, self.p = self.p, min(self.p, 1 - 1e-9)
        try:
            super().refine(layer, q, candidates, out)
        finally:
            self.p = whole
        return out


class MovesUp(TopP):
    """Moves kept units to the front even where every candidate has its place."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        out.ids.copy_(out.ids.gather(1, (out.ids < 0).int().sort(dim=1, stable=True).indices))
        return out


class KernelCutsCodesOff(TopPTriton):
    """The kernel's codes of a prompt are cut off instead of rounded: off by a whole scale."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        at = self._rows(layer, slot, torch.arange(start, start + len(k), device=k.device))
        scale, zero = layer.pools["meta"][at].float()[..., None].unbind(-2)
        rest, scale = split(k, self.outliers)[1], scale.abs()
        codes = ((rest - zero) / torch.where(scale > 0, scale, 1.0)).clamp(0, 15).byte()
        even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
        layer.pools["codes"][at] = even[..., 0] | even[..., 1] << 4


class ForgetsDecoded(TopP):
    """Decoded tokens get no copy."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class KernelSkipsTheLastBlock(TopPTriton):
    """The kernel sees no candidates behind its first block."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        block = self.weighing[0]["BLOCK_C"]
        front = torch.where(torch.arange(candidates.ids.shape[1]) < block, candidates.ids, -1)
        super().refine(layer, q, Selection(front.contiguous()), out)
        return out


class KernelHigherOfEquals(TopPTriton):
    """The kernel takes the highest unit that is dropped instead of the lowest that is kept."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        dropped = torch.where(torch.isin(candidates.ids, out.ids), -1, candidates.ids).amax(
            1, keepdim=True
        )
        lowest = out.ids.masked_fill(out.ids < 0, self.group.max_units).amin(1, keepdim=True)
        out.ids.copy_(torch.where((out.ids == lowest) & (dropped >= 0), dropped, out.ids))
        return out


class KernelForgetsTheLeast(TopPTriton):
    """The kernel drops what has just the least rank that is needed, but for two units."""

    def __init__(self, setup):
        super().__init__(setup)
        self.pruning = [each | {"UNIT_BITS": 1} for each in self.pruning]


class KernelSharesOfOneHead(TopPTriton):
    """The kernel uses the first query head of a lane alone."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        first = q.unflatten(2, (self.group.lane_heads, -1))[:, :, :, :1]
        heads = q.shape[2] // self.group.lane_heads
        super().refine(layer, first.expand(-1, -1, -1, heads, -1).flatten(2, 3), candidates, out)
        return out


class KernelCodesWholeKeys(TopPTriton):
    """The kernel takes nothing out of keys before they are coded, however large their bias is."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        def nothing(rows, pairs):
            return torch.zeros((*rows.shape[:-1], pairs), dtype=torch.int32), rows.float()

        reference.split = nothing
        try:
            TopP.construct(self, layer, slot, start, k, v, q, lse)
        finally:
            reference.split = split
