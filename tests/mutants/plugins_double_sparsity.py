"""Double Sparsity with one bug each."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_authoring.selectors import host_ids
from topkv_double_sparsity import reference, statistics
from topkv_double_sparsity.algorithm import DoubleSparsity
from topkv_double_sparsity.launch import DoubleSparsityTriton


class ChoosesAgain(DoubleSparsity):
    """Every chunk of a prompt chooses channels, and the labels before it are of other ones."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        if self.fixed is None and start > 0:
            importance = statistics.of_prompt(q, k[-len(q) :])
            chosen = reference.choose(importance, self.settings.channels)
            layer.pools["channels"][slot] = chosen
        super().construct(layer, slot, start, k, v, q, lse)


class LabelsOfNextToken(DoubleSparsity):
    """Off by one: decode writes a label where that of the token behind it belongs."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        longer = (step.lengths + 1).clamp(max=self.group.max_units)
        layer.step = evolve(step, lengths=torch.where(step.lengths > 0, longer, 0))
        super().update(layer, k, v)
        layer.step = step


class LabelsFromRing(DoubleSparsity):
    """Decode takes the key of the new token from the ring, which is not shown to everyone."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        newest = (step.lengths - 1).clamp(min=0).long() % self.group.ring_slots
        ring = layer.ring_k[step.slots.clamp(min=0).long(), :, newest]
        super().update(layer, ring[:, None, :, :, 0].flatten(2, 3), v)


class ScaleForZero(DoubleSparsity):
    """Swaps scale and zero of the 4-bit labels of a prompt."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        if self.settings.int4:
            tokens = torch.arange(start, start + len(k), device=k.device)
            slots = torch.full_like(tokens, slot)
            at = host_ids(layer, slots, tokens)
            layer.pools["meta"][at] = layer.pools["meta"][at].flip(-1)


class CutsCodesOff(DoubleSparsity):
    """Cuts 4-bit codes off instead of rounding them: off by a whole scale."""

    def _write(self, layer, slots, tokens, keys):
        super()._write(layer, slots, tokens, keys)
        if not self.settings.int4:
            return
        at = host_ids(layer, slots, tokens)
        label = reference.gather(keys, self.channels(layer)[slots]).float()
        scale, zero = layer.pools["meta"][at].float()[..., None].unbind(-2)
        codes = ((label - zero) / torch.where(scale > 0, scale, 1.0)).clamp(0, 15).byte()
        half = (label.shape[-1] + 1) // 2
        high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - label.shape[-1]))
        layer.pools["labels"][at] = codes[..., :half] | high << 4


class SharesTheScale(DoubleSparsity):
    """Codes channels with a large bias like all others, which then share its scale."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        large, reference.LARGE = reference.LARGE, float("inf")
        try:
            super().construct(layer, slot, start, k, v, q, lse)
        finally:
            reference.LARGE = large


class ForgetsTheDivisor(DoubleSparsity):
    """Queries meet large channels of 4-bit labels as they were divided."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        own = self.ranges
        self.ranges = lambda layer: own(layer) * 0 + 1
        try:
            super().retrieve_topk(layer, q, weights, out)
        finally:
            del self.ranges
        return out


class ForgetsSinks(DoubleSparsity):
    """Scores the sinks like all other tokens."""

    def __init__(self, setup):
        super().__init__(evolve(setup, params=evolve(setup.params, sink_tokens=0)))


class HeadsUnweighted(DoubleSparsity):
    """Sums the exponentials of the query heads of a lane without their normalisers."""

    def score(self, layer, q):
        _, closed = super().score(layer, q)
        group, self.group = self.group, evolve(self.group, lane_heads=self.model.num_heads)
        try:
            logits = super().score(layer, q)[0]  # a lane of one head has no normaliser
        finally:
            self.group = group
        lanes = logits.unflatten(0, (layer.step.batch, group.lane_heads, -1))
        return lanes.logsumexp(2).flatten(0, 1), closed


class HeadsOfNeighbours(DoubleSparsity):
    """Finds the channels of a kv-head where those of its neighbour stand, queries alone."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        own = self.channels
        self.channels = lambda layer: own(layer).roll(1, 1)
        try:
            super().retrieve_topk(layer, q, weights, out)
        finally:
            del self.channels
        return out


class KernelForgetsTheDivisor(DoubleSparsityTriton):
    """The score kernels read divisors of 1."""

    def score(self, layer, q):
        channels, ranges = self._looked_at(layer)
        self._looked_at = lambda layer: (channels, torch.ones_like(ranges))
        try:
            return super().score(layer, q)
        finally:
            del self._looked_at


class KernelNaturalBase(DoubleSparsityTriton):
    """The kernels get the natural logit scale for logarithms of base 2: a flatter softmax."""

    def __init__(self, setup):
        super().__init__(setup)
        self.scale = setup.model.scale
