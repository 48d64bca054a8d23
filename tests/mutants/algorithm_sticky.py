"""Quest with one bug each in its bonus for units on the device."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_quest.quest import Quest


class Unasked(Quest):
    """Prefers what is on the device although nobody asked for it."""

    def __init__(self, setup):
        super().__init__(setup)
        self.sticky = self.sticky or 0.5


class _OtherView(Quest):
    """Selects by another view of the layer."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(self.seen(layer), q, weights, out)
        return out


class PrefersAbsent(_OtherView):
    """Gives the bonus to what has to be fetched."""

    def seen(self, layer):
        return evolve(layer, held=torch.where(layer.held < 0, 0, -1).int())


class ForgetsRing(_OtherView):
    """Takes what is in the ring alone for absent."""

    def seen(self, layer):
        far = layer.step.high + 1000 * self.group.unit
        return evolve(layer, step=evolve(layer.step, high=far))


class OthersBuffer(_OtherView):
    """Uses the buffer of the request in the next slot."""

    def seen(self, layer):
        return evolve(layer, held=layer.held.roll(-self.group.lane_heads, 0))


class FirstLanesBuffer(_OtherView):
    """Every lane uses the buffer of lane 0."""

    def seen(self, layer):
        lanes = layer.held.unflatten(0, (-1, self.group.lane_heads))
        return evolve(layer, held=lanes[:, :1].expand_as(lanes).flatten(0, 1).contiguous())


class StaleBuffer(_OtherView):
    """Uses what the buffer held when it was first asked, as a copy taken for a graph would."""

    def seen(self, layer):
        if not hasattr(self, "held"):
            self.held = layer.held.clone()
        return evolve(layer, held=self.held)
