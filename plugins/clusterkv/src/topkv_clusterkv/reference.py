"""ClusterKV's selection in plain torch: what the kernels are held to.

Shapes: B rows, h kv-heads, G query heads of each, C cluster places of which the first
``clusters`` are taken, U tokens that a request can reach, K ids.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Reach:
    """Bounds of the tokens that each row attends; int64 ``[B]``.

    Attributes:
        sinks: tokens ``0 .. sinks`` are attended.
        closed: tokens ``sinks .. closed`` are in clusters.
        limit: tokens ``closed .. limit`` are the open window; the newest token is at ``limit``.
    """

    sinks: Tensor
    closed: Tensor
    limit: Tensor

    @property
    def forced(self) -> Tensor:
        return self.sinks + self.limit - self.closed


def reach(slots: Tensor, lengths: Tensor, watermark: Tensor, sinks: int) -> Reach:
    """Return which tokens of each row are sinks, in clusters, and in the open window.

    Clusters may reach further than a request that was rolled back.
    """
    limit = torch.where(slots >= 0, lengths.long() - 1, 0).clamp(min=0)
    first = limit.clamp(max=sinks)
    return Reach(first, torch.maximum(torch.minimum(watermark.long(), limit), first), limit)


def head_scores(q: Tensor, centroids: Tensor) -> Tensor:
    """``<q, mu>`` per query head, fp32 ``[B, h, G, C]``.

    Args:
        q: ``[B, h * G, D]``.
        centroids: ``[B, h, C, D]``.
    """
    q = q.float().unflatten(1, (centroids.shape[1], -1))
    return q @ centroids.float().transpose(2, 3)


def lane_scores(scores: Tensor, stored: Tensor) -> Tensor:
    """Logarithm of the mean softmax over a kv-head's query heads, fp32 ``[B, h, C]``.

    The logarithm, because the softmax of a cluster far below the best one is 0 in fp32. One query
    head ranks by its scores as they are.

    Args:
        scores: ``[B, h, G, C]`` scaled.
        stored: bool ``[B, h, C]`` clusters that hold tokens; the others get -inf.
    """
    scores = scores.masked_fill(~stored[:, :, None], -torch.inf)
    if scores.shape[2] > 1:
        scores = scores.log_softmax(-1).logsumexp(2, keepdim=True)
    return scores[:, :, 0].masked_fill(~stored, -torch.inf)


def member_counts(ends: Tensor, members: Tensor, clusters: Tensor, closed: Tensor) -> Tensor:
    """Members below ``closed`` of each cluster, int64 ``[B, h, C]``.

    Args:
        ends: int32 ``[B, h, C]`` inclusive prefix sums of the sizes.
        members: int32 ``[B, h, U]`` tokens by cluster.
        clusters, closed: int64 ``[B]``.
    """
    below = (members < closed[:, None, None]).cumsum(-1)
    below = torch.nn.functional.pad(below, (1, 0))
    place = torch.arange(ends.shape[2], device=ends.device)
    ends = torch.where(place < clusters[:, None, None], ends.long(), 0)
    upto = below.gather(2, ends)
    return torch.where(ends > 0, upto - torch.nn.functional.pad(upto[..., :-1], (1, 0)), 0)


def sizes(ends: Tensor, clusters: Tensor) -> Tensor:
    """Members of each cluster as it was made, int64 ``[B, h, C]``."""
    place = torch.arange(ends.shape[2], device=ends.device)
    before = torch.nn.functional.pad(ends[..., :-1], (1, 0))
    return torch.where(place < clusters[:, None, None], (ends - before).long(), 0)


def select(
    scores: Tensor, counts: Tensor, ends: Tensor, members: Tensor, where: Reach, width: int
) -> Tensor:
    """Forced tokens, newest first, then whole clusters by falling score until K are found.

    Of equal scores the lower cluster comes first; the last one is cut where K is reached.

    Args:
        scores: fp32 ``[B, h, C]``.
        counts: int64 ``[B, h, C]`` members that may be selected: the first ones of the cluster.
        ends, members: as in ``member_counts``.
        width: K.

    Returns:
        int64 ``[B, h, K]``, -1 behind ``min(K, limit)`` ids.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    upto = counts.gather(2, order).cumsum(-1)
    j = torch.arange(width, device=scores.device).expand(*scores.shape[:2], -1).contiguous()
    forced, limit = where.forced[:, None, None], where.limit[:, None, None]
    in_window = j < limit - where.closed[:, None, None]
    newest = torch.where(in_window, limit - 1 - j, forced - 1 - j)
    nth = j - forced
    rank = torch.searchsorted(upto, nth, right=True).clamp(max=scores.shape[2] - 1)
    cluster = order.gather(2, rank)
    size = counts.gather(2, cluster)
    start = torch.nn.functional.pad(ends[..., :-1], (1, 0)).long().gather(2, cluster)
    at = start + nth - (upto.gather(2, rank) - size)
    chosen = members.long().gather(2, at.clamp(0, members.shape[2] - 1))
    ids = torch.where(nth < 0, newest, chosen)
    return torch.where(j < limit, ids, -1)
