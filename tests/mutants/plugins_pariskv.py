"""ParisKV with one bug each."""

from __future__ import annotations

import torch

from topkv import hookimpl
from topkv_pariskv import reference
from topkv_pariskv.algorithm import ParisKV
from topkv_pariskv.launch import ParisKVTriton


class LengthAlone(ParisKV):
    """Keeps the length of a key for its factor, however little of it the signs point along."""

    def represent(self, keys, valid):
        length = keys[:, 0].float().norm(dim=-1)
        return {**super().represent(keys, valid), "factor": length / len(self.signs)}


class RotatesKeysAlone(ParisKV):
    """Scores the signs of rotated keys by queries that are not rotated."""

    def score(self, q, kept):
        signs = reference.decode(kept["codes"])[..., : q.shape[-1]]
        q = q.float().unflatten(1, (signs.shape[2], -1))
        scores = torch.einsum("bhgd,buhd->bhgu", q, signs)
        scores *= kept["factor"].float().permute(0, 2, 1)[:, :, None]
        return scores.flatten(1, 2) * self.model.scale


class WordsOfNeighbours(ParisKV):
    """A prompt's codes are those of the neighbouring kv-head, and decode's are its own."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k.roll(1, 1), v, q, lse)


class CodesWholeKeys(ParisKV):
    """Takes nothing out of keys before they are coded, however large a bias they have."""

    def represent(self, keys, valid):
        signs = self.signs
        z = reference.rotate(keys[:, 0], signs)
        codes = ((z < 0).unflatten(-1, (-1, 16)) << torch.arange(16, device=z.device)).sum(-1)
        length = z.abs().sum(-1)
        factor = keys[:, 0].float().square().sum(-1) / torch.where(length > 0, length, 1.0)
        words = super().represent(keys, valid)["outliers"]
        return {"codes": codes, "factor": factor, "outliers": torch.zeros_like(words)}


class MeanQuery(ParisKV):
    """Averages the queries of a group before they are scored, as the paper does."""

    def lane_scores(self, layer, q):
        grouped = q.unflatten(1, (self.model.num_kv_heads, -1))
        mean = grouped.float().mean(2, keepdim=True).to(q.dtype)
        return super().lane_scores(layer, mean.expand_as(grouped).flatten(1, 2))


class ForgetsRecent(ParisKV):
    """Scores the last tokens like all others."""

    def __init__(self, setup):
        super().__init__(setup)
        self.recent_units = 0


class KernelUnflipped(ParisKVTriton):
    """The kernels rotate queries without the signs that keys were multiplied with."""

    def lane_scores(self, layer, q):
        signs, self.signs = self.signs, torch.ones_like(self.signs)
        try:
            return super().lane_scores(layer, q)
        finally:
            self.signs = signs


class KernelOverlooksOutliers(ParisKVTriton):
    """The factors do not show the kernel that something left the keys."""

    def lane_scores(self, layer, q):
        layer.pools["factor"].abs_()
        return super().lane_scores(layer, q)
