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

    def represent(self, keys, valid):
        there = torch.where(valid[..., None, None], keys.float(), 0)
        return {"directions": there.sum(1) / valid.sum(1)[:, None, None]}


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
