"""Head sparsity with one bug each."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from plugins.head_sparsity.tests import test_conformance as kit
from plugins.head_sparsity.tests import test_flatness, test_runs
from tests.mutants import plugins
from topkv import hookimpl
from topkv.types import Selection
from topkv_head_sparsity.launch import BLOCK, HeadSparsityTriton
from topkv_head_sparsity.stage import HeadSparsity
from topkv_testing.kit import subject_of


class ForgetsDecoded(HeadSparsity):
    """Units that decoding fills are not represented."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class FlatOnAverage(HeadSparsity):
    """A lane is flat if its query heads are on average."""

    def weigh(self, worth, offered, closed):
        whole, weigh = super().weigh(worth, offered, closed)[1], super().weigh
        heads = [weigh(each[:, None], offered, closed)[0] for each in worth.unbind(1)]
        return torch.stack(heads).mean(0), whole


class FlatToOneHead(HeadSparsity):
    """A lane is flat if one of its query heads is."""

    def weigh(self, worth, offered, closed):
        whole, weigh = super().weigh(worth, offered, closed)[1], super().weigh
        heads = [weigh(each[:, None], offered, closed)[0] for each in worth.unbind(1)]
        return torch.stack(heads).amax(0), whole


class GoesByTheSampleAlone(HeadSparsity):
    """Leaves out what the selector has found when it weighs how flat a lane is."""

    def weigh(self, worth, offered, closed):
        others = worth.clone()
        others[..., :offered] = -math.inf
        return super().weigh(others, offered, closed)[0], super().weigh(worth, offered, closed)[1]


class CountsCandidatesTwice(HeadSparsity):
    """A candidate that stands in the sample counts there too."""

    @staticmethod
    def _offered(others, units):
        return torch.zeros_like(others, dtype=torch.bool)


class SampleStandsForItself(HeadSparsity):
    """A unit of the sample counts once, however many it stands for."""

    def weigh(self, worth, offered, closed):
        alone = torch.isfinite(worth[:, 0]).sum(1)
        flatness, whole = super().weigh(worth, offered, alone)
        both = (each.clamp(min=2).float().log() for each in (alone, closed))
        return flatness * next(both) / next(both), whole


class UnscaledLogits(HeadSparsity):
    """Logits without the model's scale: too sharp a softmax."""

    def worth(self, layer, q, units):
        return super().worth(layer, q / self.model.scale, units)


class RanksByOneHead(HeadSparsity):
    """Candidates rank by what they are worth to the first query head of a lane."""

    def weigh(self, worth, offered, closed):
        flatness, whole = super().weigh(worth, offered, closed)
        others = torch.arange(whole.shape[1], device=whole.device) > 0
        return flatness, torch.where(others, math.inf, whole)


class KeepsOneMore(HeadSparsity):
    """A flat lane keeps a candidate more than its share."""

    def __init__(self, setup):
        super().__init__(setup)
        self.few += 1


class DropsWhatKCovers(HeadSparsity):
    """A lane of no more closed units than K may be flat too."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        whole, self.group = self.group, evolve(self.group, select=1)
        try:
            super().refine(layer, q, candidates, out)
        finally:
            self.group = whole
        return out


class MovesUp(HeadSparsity):
    """Moves kept units to the front."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        out.ids.copy_(out.ids.gather(1, (out.ids < 0).int().sort(dim=1, stable=True).indices))
        return out


class ExceedsTheMaximum(HeadSparsity):
    """With a threshold of 1 a lane is flat where rounding says so."""

    def __init__(self, setup):
        super().__init__(setup)
        self.threshold = min(self.threshold, 1.0)


class KernelCutsCodesOff(HeadSparsityTriton):
    """The kernel's codes of a prompt are cut off instead of rounded: off by a whole scale."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        codes = layer.pools["codes"]
        codes.copy_(torch.where(codes % 16 > 8, codes - 1, codes))


class KernelSkipsTheLastBlock(HeadSparsityTriton):
    """The kernel drops every candidate behind its first block."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        front = torch.where(torch.arange(candidates.ids.shape[1]) < BLOCK, candidates.ids, -1)
        super().refine(layer, q, Selection(front.contiguous()), out)
        return out


class KernelHigherOfEquals(HeadSparsityTriton):
    """The kernel takes the highest unit that is dropped instead of the lowest that is kept."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        dropped = torch.where(out.ids < 0, candidates.ids, -1).amax(1, keepdim=True)
        lowest = out.ids.masked_fill(out.ids < 0, self.group.max_units).amin(1, keepdim=True)
        left = torch.where((out.ids == lowest) & (dropped >= 0), -1, out.ids)
        out.ids.copy_(torch.where(candidates.ids == dropped, dropped, left))
        return out


class KernelOfOneHead(HeadSparsityTriton):
    """The kernel asks the first query head of a lane alone whether it is flat."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        first = q.unflatten(2, (self.group.lane_heads, -1))[:, :, :, :1]
        heads = q.shape[2] // self.group.lane_heads
        super().refine(layer, first.expand(-1, -1, -1, heads, -1).flatten(2, 3), candidates, out)
        return out


ANYWHERE, INTERPRETED = ("cpu", "interpret"), ("interpret",)
own = plugins._own(
    HeadSparsityTriton,
    subject=lambda on: subject_of(kit.ENTRY, "stage", on, kit.OPTIONS),
    name=lambda on: on.name,
)


def of_kit(broken, test, tiers=("cpu",)):
    return plugins._stage(broken, HeadSparsityTriton, kit, test, tiers)


FLAT = (test_flatness, "flat_lanes_keep_their_share_and_others_everything")
SAMPLED = (test_flatness, "more_units_than_the_sample_and_candidates_of_many_blocks")
SHARP = (test_flatness, "one_sharp_head_keeps_what_its_lane_is_given")
EVEN = (test_flatness, "of_equal_units_the_lowest_are_kept")
ROUNDED = (test_flatness, "rounding_makes_no_lane_flatter_than_flat")
COVERED = (test_flatness, "what_k_covers_is_left")
BITS = (test_runs, "kernels_write_what_the_reference_writes")

MUTANTS = [
    of_kit(FlatToOneHead, plugins.LEFT),
    of_kit(KeepsOneMore, plugins.LEFT),
    of_kit(RanksByOneHead, plugins.LEFT),
    of_kit(KernelHigherOfEquals, plugins.LOWEST, INTERPRETED),
    of_kit(CountsCandidatesTwice, plugins.LONG),
    plugins._stage(ForgetsDecoded, HeadSparsityTriton, kit, plugins.DECODED, ANYWHERE),
    own(FlatOnAverage, *SHARP),
    own(GoesByTheSampleAlone, *SAMPLED, factor=0.99),
    own(CountsCandidatesTwice, *FLAT),
    own(SampleStandsForItself, *SAMPLED, factor=0.99),
    own(UnscaledLogits, *FLAT),
    own(RanksByOneHead, *FLAT),
    own(KeepsOneMore, *EVEN, ANYWHERE, share=0.25, count=5),
    own(DropsWhatKCovers, *COVERED),
    own(MovesUp, *EVEN, ANYWHERE, share=0.25, count=5),
    own(ExceedsTheMaximum, *ROUNDED, closed=140),
    own(KernelCutsCodesOff, *BITS, INTERPRETED, dtype=torch.float32),
    own(KernelSkipsTheLastBlock, *SAMPLED, INTERPRETED, factor=0.99),
    own(KernelHigherOfEquals, *EVEN, INTERPRETED, share=0.25, count=5),
    own(KernelOfOneHead, *SHARP, INTERPRETED),
]
