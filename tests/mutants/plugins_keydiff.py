"""KeyDiff with one bug each."""

from __future__ import annotations

import torch

from topkv import hookimpl
from topkv_keydiff.kernels import KeyDiffKernels
from topkv_keydiff.stage import KeyDiff


class ForgetsDecoded(KeyDiff):
    """Units that decoding fills are not represented."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class KeepsTheAlike(KeyDiff):
    """Pages that are like the others stay."""

    def keep(self, layer, slot, length, position, scores):
        super().keep(layer, slot, length, position, scores)
        scores.neg_()


class LongKeysWeighMore(KeyDiff):
    """The mean key, not the mean direction."""

    def _write(self, layer, slots, units, keys, valid):
        there = valid[..., None, None]
        long = torch.where(there, keys * keys.float().norm(dim=-1, keepdim=True).sqrt(), 0)
        super()._write(layer, slots, units, torch.where(there, long.mean(1, True), 0), valid)


class GoesByOtherRequests(KeyDiff):
    """All of the pool is averaged, and not the pages of the request."""

    def keep(self, layer, slot, length, position, scores):
        super().keep(layer, slot, length, position, scores)
        scores += layer.pools["directions"].float().nan_to_num().sum()


class KernelSkipsTheLastToken(KeyDiffKernels):
    """The kernel reads a token too few of a chunk."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k[: max(1, len(k) - 1)], v, q, lse)
