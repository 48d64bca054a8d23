"""Clusters of a request in one layer: the pools that hold them, and how they grow. Cold.

All pools are of grain request, ``[max_requests, *shape]``:

========== =================== ==============================================================
centroids  ``[h, C, D]``       mean of the members, in the 16-bit dtype of the keys, or fp32
ends       ``[h, C]`` int32    inclusive prefix sums of the cluster sizes
members    ``[h, U]`` int32    tokens sorted by cluster; ascending within a cluster
keys       ``[h, P, D]``       the newest keys, position p at p % P
state      ``[4]`` int32       see ``State``
========== =================== ==============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

from topkv.hooks.algorithm import RepresentationSpec
from topkv.types import GroupShape
from topkv_clusterkv.entry import ClusterParams
from topkv_clusterkv.kmeans import kmeans, spread


class State(IntEnum):
    """Columns of the pool ``state``.

    Attributes:
        WATERMARK: the lowest position that was written since tokens were clustered last. What
            clusters hold from there on is of rejected tokens and counts for nothing; it goes when
            the next tokens are clustered.
        BUILT: tokens ``sinks .. built`` were clustered, the same ones in each head.
        CLUSTERS: places of clusters that are taken.
        HELD: from here on ``keys`` are those of the request, and not of tokens that a cut has
            rejected. Decode need not write it, since the places that it takes before the next
            settle are older.
    """

    WATERMARK = 0
    BUILT = 1
    CLUSTERS = 2
    HELD = 3


def representations(group: GroupShape, settings: ClusterParams) -> tuple[RepresentationSpec, ...]:
    heads, dim = group.num_kv_heads, group.head_dim
    clusters = settings.max_clusters(group.max_units)
    pending = settings.pending(group.ring_slots)
    return (
        RepresentationSpec("centroids", "request", (heads, clusters, dim), group.dtype),
        RepresentationSpec("ends", "request", (heads, clusters), torch.int32),
        RepresentationSpec("members", "request", (heads, group.max_units), torch.int32),
        RepresentationSpec("keys", "request", (heads, pending, dim), group.dtype),
        RepresentationSpec("state", "request", (len(State),), torch.int32),
    )


class RequestClusters:
    """The clusters of one request in one layer, to be changed.

    Args:
        pools: of the layer.
        slot: the request.
        settings: parameters.
        built: clustered up to here, on the host.
        clusters: taken places, on the host.
    """

    def __init__(
        self,
        pools: Mapping[str, Tensor],
        slot: int,
        settings: ClusterParams,
        built: int,
        clusters: int,
    ) -> None:
        self.settings, self.built, self.clusters = settings, built, clusters
        self.centroids, self.ends = pools["centroids"][slot], pools["ends"][slot]
        self.members = pools["members"][slot]

    def trim(self, first: int) -> None:
        """Forget the members from position ``first`` on, and the places of empty clusters.

        Rare, after a rollback or a truncation: the number of clusters that stay comes from the
        device.
        """
        sinks = self.settings.sinks
        if first <= sinks:
            self.built = self.clusters = 0
        if first >= self.built:
            return
        ids = self.members[:, : self.built - sinks]
        keep = ids < first
        count = torch.nn.functional.pad(keep.cumsum(1), (1, 0))
        ends = count.gather(1, self.ends[:, : self.clusters].long())
        kept = first - sinks
        self.members[:, :kept] = ids[keep].view(-1, kept)
        # Clusters with members move to the front of their head, in order; members stay.
        sizes = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        order = (sizes == 0).int().sort(dim=1, stable=True).indices
        places = order[..., None].expand(-1, -1, self.centroids.shape[2])
        self.ends[:, : self.clusters] = sizes.gather(1, order).cumsum(1).int()
        self.centroids[:, : self.clusters] = self.centroids.gather(1, places)
        self.clusters = int((sizes > 0).sum(1).max())
        self.built = first

    def append(self, keys: Tensor, first: int) -> None:
        """Cluster keys ``[n, h, D]`` of positions from ``first`` on, behind what there is.

        Rollbacks may have left many small clusters and few places: then there are
        fewer new clusters, and without any place the tokens join the last cluster.
        """
        keys = keys.transpose(0, 1).float()
        tokens, places = keys.shape[1], self.ends.shape[1]
        used = first - self.settings.sinks
        self.built = first + tokens
        clusters = min(self.settings.clusters(tokens), places - self.clusters)
        if clusters == 0:
            self._extend_last(keys, first, used)
            return
        positions = _to_device(spread(tokens, clusters, self.settings.seed), keys.device)
        labels, centroids, sizes = kmeans(keys, positions, self.settings.iterations)
        order = labels.sort(dim=1, stable=True).indices
        self.members[:, used : used + tokens] = (order + first).int()
        new = slice(self.clusters, self.clusters + clusters)
        self.ends[:, new] = (sizes.long().cumsum(1) + used).int()
        self.centroids[:, new] = centroids.to(self.centroids.dtype)
        self.clusters += clusters

    def _extend_last(self, keys: Tensor, first: int, used: int) -> None:
        tokens, last = keys.shape[1], self.clusters - 1
        before = self.ends[:, last - 1] if last else torch.zeros_like(self.ends[:, 0])
        size = (self.ends[:, last] - before).float()[:, None]
        total = self.centroids[:, last].float() * size + keys.sum(1)
        self.centroids[:, last] = (total / (size + tokens)).to(self.centroids.dtype)
        new = torch.arange(first, first + tokens, device=keys.device, dtype=torch.int32)
        self.members[:, used : used + tokens] = new
        self.ends[:, last] = used + tokens


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for: a pageable one would wait for the whole stream."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
