"""Counters of what prompts found, all together and by tenant."""

from __future__ import annotations

from attrs import define, field

from topkv_prefixes.calls import StorageCounts


@define
class TenantCounts:
    """Counters of one tenant so far.

    Attributes:
        asked, found: tokens of its requests, and how many of them were taken over.
        kept, kept_bytes: pages in host memory that no request holds and that it can find.
        evicted: pages that were kept for it and given out again, whether for its quota or for want
            of room.
    """

    asked: int = 0
    found: int = 0
    kept: int = 0
    kept_bytes: int = 0
    evicted: int = 0


@define
class PrefixCounts:
    """Counters of all prompts so far.

    Attributes:
        asked, found: tokens of requests that began by their tokens, and how many of them were
            taken over.
        kept: pages that no request holds and that can be found.
        evicted: pages that were kept and given out again.
        storage: counts of the storage; None without one.
        tenants: counters of each tenant, see ``Prefixes.tenant``; "" for requests of none. Of
            tenants that keep nothing, a few more than requests can run are remembered.
    """

    asked: int = 0
    found: int = 0
    kept: int = 0
    evicted: int = 0
    storage: StorageCounts | None = None
    tenants: dict[str, TenantCounts] = field(factory=dict)
