"""Kernels around device functions: a selector by mean keys, under the suite of algorithms."""

from __future__ import annotations

import pytest
import torch
from attrs import field, frozen

from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.hooks.algorithm import AlgorithmSetup, RepresentationSpec
from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import RadixTopK
from topkv.types import GroupShape, LayerView, ModelShape
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

    The factor is there for ``prepare_query``, the count for a second pool and ``finish_tile``.
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
def turned(q, d, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Channels from the last to the first, which changes no product, and the factor of scores."""
    return tl.flip(q, 0), tl.flip(d, 0), tl.full([q.shape[1]], OPTIONS[0], tl.float32)


@jit
def add_products(scores, q, pools, at, d, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Products of queries and mean keys."""
    means = tl.load(pools[0] + at[:, None] * D + d, inside, other=0.0)
    return tl.dot(means, q.to(tl.float32), acc=scores, input_precision="ieee")


@jit
def times_count(scores, pools, at, inside, OPTIONS: tl.constexpr, D: tl.constexpr):
    """Scores times the share of a unit that is there."""
    count = tl.load(pools[1] + at, inside, other=0)
    return scores * (count.to(tl.float32) / OPTIONS[1])[:, None]


class MeansKernels(UnitKernels, Means):
    represent_unit, score_tile, finish_tile = write_means, add_products, times_count
    prepare_query = turned

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
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 128), scopes=("kv_head", "shared"), traits=("value_free",)
            ),
            defaults={"unit": 8},
            parameters=UnitParams,
        )

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(selects=(2, 3, 5))


class Largest(MeansKernels):
    """Ranks by the best query head of a lane, which kernels do not."""

    def combine(self, scores):
        return scores.amax(2)


def group_of(layers=1, dim=16, unit=4, requests=1):
    lanes = {"lane_heads": 2, "heads_per_lane": 1, "head_dim": dim, "dtype": torch.bfloat16}
    sizes = {"page_tokens": 2 * unit, "max_requests": requests, "max_units": 8, "select": 2}
    slots = {"buffer_slots": 4, "ring_slots": 2}
    return GroupShape(layers=tuple(range(layers)), unit=unit, **lanes, **sizes, **slots)


def made(cls=MeansKernels, dim=16, heads=4, **kwargs):
    group = group_of(dim=dim, **kwargs)
    model = ModelShape(1, heads, 2, dim, group.dtype, 0.5)
    device = torch.device("cpu")
    topk = lambda *sizes: RadixTopK(TopKSetup(*sizes, device))  # noqa: E731
    return cls(AlgorithmSetup(model, group, {}, device, topk))


def test_a_combine_that_kernels_would_not_call_is_refused():
    with pytest.raises(PluginError, match="got a class with a combine of its own; leave it out"):
        made(Largest)
    made(MeansKernels)


def test_a_combine_beside_kernels_that_call_it_is_taken():
    made(type("Own", (Largest,), {"lane_scores": Means.lane_scores}))


@pytest.mark.parametrize("sizes", [{"dim": 257}, {"heads": 130}])
def test_a_query_that_is_too_large_to_prepare_is_refused(sizes):
    with pytest.raises(ConfigError, match="prepare_query needs a query at once, up to 256"):
        made(**sizes)
    made(type("Plain", (MeansKernels,), {"prepare_query": None}), **sizes)


def layer_of(algorithm, index):
    """A layer view of which nothing but the memory is there."""
    group = algorithm.group
    rings = torch.zeros(2, 1, 2, 2, 1, group.unit, group.head_dim, dtype=group.dtype)
    pools = {
        spec.name: torch.zeros(16, *spec.shape, dtype=spec.dtype)
        for spec in algorithm.representations()
    }
    return LayerView(index, index, group, None, *rings, pools)


def test_views_of_a_layer_are_made_once_and_are_its_own():
    algorithm = made()
    first, second = layer_of(algorithm, 0), layer_of(algorithm, 1)
    bound = algorithm.bound(first)
    assert algorithm.bound(second).pools[0].data_ptr() == second.pools["means"].data_ptr()
    assert algorithm.bound(first) is bound
    assert bound.pools[0].data_ptr() == first.pools["means"].data_ptr()
    assert bound.keys.data_ptr() == first.ring_k.data_ptr()
    assert bound.values.data_ptr() == first.ring_v.data_ptr()


@pytest.mark.parametrize("name", ["pools", "ring_k"])
def test_a_layer_in_other_memory_gets_other_views(name):
    algorithm = made()
    layer, other = layer_of(algorithm, 0), layer_of(algorithm, 0)
    before = algorithm.bound(layer)
    setattr(layer, name, getattr(other, name))
    after = algorithm.bound(layer)
    assert after is not before
    assert after.pools[0].data_ptr() == layer.pools["means"].data_ptr()
    assert after.keys.data_ptr() == layer.ring_k.data_ptr()
