"""Kernels around device functions: a selector by mean keys, under the suite of algorithms."""

from __future__ import annotations

import pytest
import torch
from attrs import field, frozen

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import RepresentationSpec
from topkv_authoring.language import jit, tl
from topkv_authoring.parameters import BONUS
from topkv_authoring.selectors import ScoredUnits
from topkv_authoring.units import UnitKernels
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests

FACTOR = 2


@frozen
class UnitParams:
    """Parameters that ``ScoredUnits`` knows."""

    sink_units: int = 0
    recent_units: int = 0
    sticky: float = field(default=0.0, validator=BONUS)


class Means(ScoredUnits):
    """A unit is worth twice the logit of its mean key, times the count of its tokens over itself.

    The count is there for a second pool, and for ``finish_tile``.
    """

    def representations(self):
        heads, dim = self.group.num_kv_heads, self.group.head_dim
        return [
            RepresentationSpec("means", "unit", (heads, dim), torch.float32),
            RepresentationSpec("count", "unit", (heads,), torch.int32),
        ]

    def represent(self, keys, valid):
        there = valid[..., None, None]
        count = there.sum(1)
        means = torch.where(there, keys.float(), 0.0).sum(1) / count
        return {"means": means, "count": count[..., 0].expand(means.shape[:2]).int()}

    def score(self, q, kept):
        grouped = q.float().unflatten(1, (self.group.num_kv_heads, -1))
        scores = torch.einsum("nhgd,nuhd->nhgu", grouped, kept["means"])
        count = kept["count"].float().permute(0, 2, 1)[:, :, None] / self.group.unit
        return (scores * FACTOR * count).flatten(1, 2) * self.model.scale


@jit
def write_means(k, v, valid, tokens, pools, at, OPTIONS: tl.constexpr, D: tl.constexpr):
    """``Means.represent`` of a unit."""
    d = tl.arange(0, k.shape[1])
    tl.store(pools[0] + at * D + d, tl.sum(k, 0) / tokens, d < D)
    tl.store(pools[1] + at, tokens)


@jit
def add_products(scores, q, pools, at, d, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Products of queries and mean keys."""
    means = tl.load(pools[0] + at[:, None] * D + d, inside, other=0.0)
    return tl.dot(means, q.to(tl.float32), acc=scores, input_precision="ieee")


@jit
def times_count(scores, pools, at, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Scores times the factor and the share of a unit that is there."""
    count = tl.load(pools[1] + at, inside, other=0)
    return scores * (OPTIONS[0] * count.to(tl.float32) / OPTIONS[1])[:, None]


class MeansKernels(UnitKernels, Means):
    represent_unit, score_tile, finish_tile = write_means, add_products, times_count

    @property
    def options(self):
        return FACTOR, self.group.unit


class TestMeans(AlgorithmTests):
    """Every rule of the suite that holds for a mean, which finds no needle."""

    @pytest.fixture
    def plugin(self):
        return PluginEntry(
            name="means",
            kind="algorithm",
            factories={
                "reference": f"{__name__}:Means",
                "triton": f"{__name__}:MeansKernels",
            },
            hook_api=(2, 0),
            capabilities=Capabilities(
                units=(1, 128), scopes=("kv_head", "shared"), traits=("value_free",)
            ),
            defaults={"unit": 8},
            parameters=UnitParams,
        )

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(selects=(2, 3, 5))
