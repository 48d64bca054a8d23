"""RocketKV with one bug each."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_authoring import votes
from topkv_rocketkv import kernels, reference
from topkv_rocketkv.algorithm import SETTLED, UNREAD, RocketKV
from topkv_rocketkv.launch import RocketKVTriton


class Unpooled(RocketKV):
    """Keeps the best votes without their neighbours."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        pooled, votes.pooled = votes.pooled, lambda scores, kernel: scores
        try:
            super().settle(layer, slot, since, length, history)
        finally:
            votes.pooled = pooled


class WindowForgotten(RocketKV):
    """The oldest token of the window has to win by votes."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        params = self.params
        self.params = evolve(params, window=params.window - 1)
        try:
            super().settle(layer, slot, since, length, history)
        finally:
            self.params = params


class OldVotersStay(RocketKV):
    """Queries of an earlier prompt vote on the next one."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        layer.pools["state"][slot, SETTLED] = 0
        super().construct(layer, slot, start, k, v, q, lse)


class DroppedForGood(RocketKV):
    """Drops for later prompts what an earlier prompt dropped."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        dropped = layer.pools["dropped"][slot]
        before = dropped.clone()
        super().settle(layer, slot, since, length, history)
        dropped |= before


class RejectedStayDropped(RocketKV):
    """A token in the place of a rejected one is dropped with it."""

    @hookimpl
    def truncated(self, layer, slot, length):
        layer.pools["dropped"][slot, :, length // self.group.unit :] = 1


class UnitsNeedAllTokens(RocketKV):
    """A unit is dropped unless all of its tokens are kept."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        held = reference.units_of
        reference.units_of = lambda tokens, unit: ~held(~tokens, unit)
        try:
            super().settle(layer, slot, since, length, history)
        finally:
            reference.units_of = held


class SelectsDropped(RocketKV):
    """Votes change nothing: units that were dropped compete like others."""

    def lane_scores(self, layer, q):
        dropped = layer.pools["dropped"].clone()
        layer.pools["dropped"].zero_()
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.pools["dropped"].copy_(dropped)


class SignOfFirstHead(RocketKV):
    """The first query head of a group says which bound counts, not their sum."""

    def score(self, q, kept):
        grouped = q.unflatten(1, (self.model.num_kv_heads, -1)).float()
        sign = torch.where(grouped[:, :, 0] > 0, 1.0, -1.0)[:, None, :, None]
        low, high = kept["bounds"].float().split(1, 3)
        bound = torch.where(sign > 0, high, low)
        return super().score(q, {**kept, "bounds": bound.expand(-1, -1, -1, 2, -1)})


class ReadsSmallestChannels(RocketKV):
    """Reads as many channels as it should, and those of the smallest queries."""

    def score(self, q, kept):
        best = reference.best_channels

        def smallest(q, count):
            return ~best(q, q.shape[-1] - count)

        reference.best_channels = smallest
        try:
            return super().score(q, kept)
        finally:
            reference.best_channels = best


class NoTemperature(RocketKV):
    """Scores of few channels count as if all had been read."""

    def score(self, q, kept):
        warm = reference.temperatures
        reference.temperatures = lambda q, chosen: torch.ones_like(q[..., 0])
        try:
            return super().score(q, kept)
        finally:
            reference.temperatures = warm


class OpenUnitUncounted(RocketKV):
    """Units that a prompt leaves open lose their first tokens when decode closes them."""

    def represent(self, keys, valid):
        if len(valid) and valid.shape[1] > 1:
            first = valid.clone()
            first[:, 0] &= ~valid[:, 1]
            valid = first
        return super().represent(keys, valid)


class RowForSlot(RocketKV):
    """Looks up what was dropped by the number of the row, not by its slot."""

    def lane_scores(self, layer, q):
        step, pools = layer.step, layer.pools
        order = torch.arange(len(pools["dropped"]), device=q.device)
        live = step.slots >= 0
        order[step.slots[live].long()] = torch.arange(step.batch, device=q.device)[live]
        layer.pools = {**pools, "dropped": pools["dropped"][order]}
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.pools = pools


class TailTooShort(RocketKV):
    """Says that over pages of another request one voter less of a prompt need be computed."""

    @hookimpl
    def spec(self):
        spec = super().spec()
        return evolve(spec, prompt_tail=spec.prompt_tail - 1)


class KernelReadsOneMore(RocketKVTriton):
    """The kernels read a channel more than the split has."""

    def lane_scores(self, layer, q):
        unread = layer.pools["state"][:, UNREAD]
        before = unread.clone()
        unread.copy_((before - 1).clamp(min=0))
        try:
            return super().lane_scores(layer, q)
        finally:
            unread.copy_(before)


class KernelReadsMinima(RocketKVTriton):
    """The kernels read the minimum of every channel."""

    def lane_scores(self, layer, q):
        kernel = kernels.score_kernel
        sides = self.sides

        class Launch:
            def __getitem__(self, grid):
                sides.copy_(-sides.abs())
                return kernel[grid]

        kernels.score_kernel = Launch()
        try:
            return super().lane_scores(layer, q)
        finally:
            kernels.score_kernel = kernel
