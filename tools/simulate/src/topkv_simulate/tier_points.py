"""Hits and first tokens over sizes of tiers, and the sizes that suffice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from topkv_simulate.asked import Asked, AskedError
from topkv_simulate.tier_bound import most_found
from topkv_simulate.tiers import Counts, Sizes, Tiers, pages_in


@frozen
class Speeds:
    """Speeds that decide when a first token comes.

    Attributes:
        prefill: tokens of a prompt that are computed in a second.
        read: GB/s (10^9 bytes) that the storage gives; None without a storage.
    """

    prefill: float
    read: float | None = None


@frozen(eq=False)
class TierPoint:
    """Two sizes and a policy, over all prompts of a trace.

    Attributes:
        sizes: sizes of the tiers.
        counts: tokens that were found, and pages that were moved.
        first_ms: float64 ``[prompts]`` milliseconds until all of a prompt was there: pages from
            the storage, then the tokens that were computed.
        most: most tokens that any policy finds in as many pages.
        asked: the trace.
    """

    sizes: Sizes
    counts: Counts
    first_ms: np.ndarray
    most: int
    asked: Asked

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.counts.asked)

    def share(self, tokens: int) -> float:
        """Return the share of ``tokens`` in all tokens of prompts."""
        return tokens / self.tokens

    @property
    def p95(self) -> float:
        """Milliseconds that 95 % of the prompts do not exceed."""
        return float(np.percentile(self.first_ms, 95, method="higher"))

    def as_dict(self) -> dict[str, Any]:
        """Return the point as ``topkv tiers --json`` prints it."""
        counts, asked = self.counts, self.asked
        host, stored = sum(counts.host), sum(counts.stored)
        return {
            "host_bytes": self.sizes.host,
            "max_tokens": max_tokens(asked, self.sizes.host),
            "storage_bytes": self.sizes.storage,
            "write": self.sizes.write,
            "asked_tokens": self.tokens,
            "host_tokens": host,
            "storage_tokens": stored,
            "computed_tokens": self.tokens - host - stored,
            "most_tokens": self.most,
            "first_token_ms": float(self.first_ms.mean()),
            "p95_first_token_ms": self.p95,
            "read_bytes": counts.fetched * asked.object_bytes,
            "written_bytes": counts.written * asked.object_bytes,
            "evicted_pages": counts.evicted,
            "removed_pages": counts.removed,
        }


def max_tokens(asked: Asked, host: int) -> int:
    """Return the setting ``max_tokens`` that makes a host pool of at most ``host`` bytes."""
    return max(0, pages_in(asked, host) - 1 - asked.slots) * asked.page_tokens


def points_of(asked: Asked, sizes: Sequence[Sizes], speeds: Speeds) -> list[TierPoint]:
    """Replay a trace in all sizes.

    Raises:
        AskedError: the trace asks for nothing, or requests do not fit; with every size.
    """
    found: list[Counts] = []
    reasons: list[str] = []
    for each in sizes:
        try:
            found.append(Tiers(asked, each).run())
        except AskedError as error:
            reasons += error.reasons
    if reasons:
        raise AskedError("the trace cannot be replayed", list(dict.fromkeys(reasons)))
    if not found or not sum(found[0].asked):
        raise AskedError("nothing can be counted", ["no prompt begins in this trace"])
    rooms = [pages_in(asked, each.host) - 1 + each.storage // asked.object_bytes for each in sizes]
    most = most_found(asked, rooms)
    return [
        TierPoint(each, counts, _first_ms(asked, counts, speeds), bound, asked)
        for each, counts, bound in zip(sizes, found, most, strict=True)
    ]


def _first_ms(asked: Asked, counts: Counts, speeds: Speeds) -> np.ndarray:
    tokens, host, stored = (
        np.array(each, np.float64) for each in (counts.asked, counts.host, counts.stored)
    )
    read = stored / asked.page_tokens * asked.object_bytes / (1e9 * (speeds.read or 1.0))
    first: np.ndarray = 1e3 * (read + (tokens - host - stored) / speeds.prefill)
    return first


def recommend(points: Sequence[TierPoint], within: float) -> TierPoint:
    """Return the smallest host pool, with the smallest storage, that comes close to the best.

    Args:
        points: points to choose from.
        within: share by which the mean first token may come later than that of the best.
    """
    best = min(float(point.first_ms.mean()) for point in points)
    good = [point for point in points if point.first_ms.mean() <= (1 + within) * best]
    return min(good, key=lambda each: (each.sizes.host, each.sizes.storage, each.first_ms.mean()))
