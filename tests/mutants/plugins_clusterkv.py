"""ClusterKV with one bug each."""

from __future__ import annotations

import torch
from attrs import evolve

from topkv import hookimpl
from topkv_clusterkv import kmeans, store
from topkv_clusterkv.algorithm import ClusterKV
from topkv_clusterkv.launch import ClusterKVTriton

CLUSTERED = 2**30
"""A watermark beyond every request."""


def _with(layer, **pools):
    return evolve(layer, pools={**layer.pools, **pools})


class CutsFront(ClusterKV):
    """Takes the last members of the cluster that does not fit whole, instead of the first."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        members = layer.pools["members"].clone()
        counts = layer.pools["state"][:, 2].tolist()
        for slot, count in enumerate(counts):
            for head, ends in enumerate(layer.pools["ends"][slot, :, :count].tolist()):
                for start, end in zip([0, *ends], ends, strict=False):
                    members[slot, head, start:end] = members[slot, head, start:end].flip(0)
        super().retrieve_topk(_with(layer, members=members), q, weights, out)
        return out


class ForgetsOpenWindow(ClusterKV):
    """Attends no token that is in no cluster yet."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        state = layer.pools["state"].clone()
        state[:, 0] = CLUSTERED
        super().retrieve_topk(_with(layer, state=state), q, weights, out)
        return out


class ClustersLate(ClusterKV):
    """Clusters a window of generated tokens one token too late."""

    @hookimpl
    def spec(self):
        spec = super().spec()
        return evolve(spec, settle_period=spec.settle_period + 1)


class KeepsRejected(ClusterKV):
    """Does not note that a clustered token was taken back: the rejected one stays selectable."""

    @hookimpl
    def update(self, layer, k, v):
        state = layer.pools["state"].clone()
        super().update(layer, k, v)
        layer.pools["state"].copy_(state)


class Swapped(ClusterKV):
    """Clusters with one function of ``kmeans`` or ``store`` in another's place."""

    owner, name = kmeans, ""

    def broken(self, *args):
        raise NotImplementedError

    def _swapped(self, hook, *args):
        whole = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.broken)
        try:
            hook(*args)
        finally:
            setattr(self.owner, self.name, whole)

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        self._swapped(super().construct, layer, slot, start, k, v, q, lse)

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        self._swapped(super().settle, layer, slot, since, length, history)


_kmeans, _means = kmeans.kmeans, kmeans.means


class EmptyIsNaN(Swapped):
    """An empty cluster gets 0 / 0 for a centroid."""

    owner, name = store, "kmeans"

    def broken(self, keys, first, iterations):
        labels, centroids, sizes = _kmeans(keys, first, iterations)
        return labels, torch.where((sizes > 0)[..., None], centroids, torch.nan), sizes


class MeansOfDirections(Swapped):
    """The centroid is the mean of the members' directions, not of the members."""

    name = "means"

    def broken(self, keys, labels, clusters):
        return _means(kmeans.unit_vectors(keys), labels, clusters)


class AddsHeadsUp(ClusterKV):
    """Averages a group's queries before it scores, instead of its softmaxes after."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        grouped = q.unflatten(2, (self.model.num_kv_heads, -1))
        mean = grouped.float().mean(3, keepdim=True).to(q.dtype)
        super().retrieve_topk(layer, mean.expand_as(grouped).flatten(2, 3), weights, out)
        return out


class KernelUnscaled(ClusterKVTriton):
    """The score kernel gets another logit scale: the heads of a group weigh otherwise."""

    def __init__(self, setup):
        super().__init__(evolve(setup, model=evolve(setup.model, scale=64.0)))
