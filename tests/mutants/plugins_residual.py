"""The residual with one bug each."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from topkv import hookimpl
from topkv.types import Selection
from topkv_residual.launch import BLOCK_K, TILE_U, TILES, ResidualTriton
from topkv_residual.stage import Residual


class ForgetsDecoded(Residual):
    """Units that decoding fills are not represented."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class CountsTwice(Residual):
    """Adds attended units once more."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, Selection(torch.full_like(selection.ids, -1)), out, lse)


class CountsTheOpenUnit(Residual):
    """The open unit, which is always attended, is added once more."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        longer = layer.step.lengths + self.group.unit * (layer.step.slots >= 0)
        step = evolve(layer.step, lengths=longer)
        super().correct(evolve(layer, step=step), q, selection, out, lse)


class WeighsAsOneToken(Residual):
    """A unit weighs as much as one of its tokens."""

    def weights(self, q, mean):
        return super().weights(q, mean) - math.log(self.group.unit)


class AddsKeys(Residual):
    """Mean keys are added in the place of mean values."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        means = layer.pools["means"]
        pools = {**layer.pools, "means": means[..., :1, :].expand_as(means)}
        super().correct(evolve(layer, pools=pools), q, selection, out, lse)


class KernelScalesTwice(ResidualTriton):
    """The kernel multiplies logits with their scale twice."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        model, self.model = self.model, evolve(self.model, scale=self.model.scale**2)
        try:
            super().correct(layer, q, selection, out, lse)
        finally:
            self.model = model


class KernelSkipsTheLastShare(ResidualTriton):
    """The kernel sees no units behind the first share."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        step = layer.step
        short = evolve(step, lengths=step.lengths.clamp(max=TILE_U * TILES * self.group.unit))
        super().correct(evolve(layer, step=short), q, selection, out, lse)


class KernelSkipsTheLastIds(ResidualTriton):
    """The kernel compares units with the first block of ids alone."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        front = torch.where(torch.arange(selection.ids.shape[1]) < BLOCK_K, selection.ids, -1)
        super().correct(layer, q, Selection(front), out, lse)
