"""How many tokens any policy could find in so many pages, if it knew what will be asked."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from topkv_simulate.asked import DOES, Asked


def most_found(asked: Asked, capacities: Sequence[int]) -> list[int]:
    """The most tokens of prompts that tiers of so many pages together can find.

    A page that is asked for was asked for or published before, and was kept since then. As many
    such spans as overlap nowhere more often than there is room are kept by dropping, wherever
    there are too many, the one that lasts longest (Belady 1966). Prompts find only what stands
    without a hole at their beginning, and running requests hold pages, so this is no policy, and
    none finds more.

    Args:
        asked: the trace.
        capacities: pages of both tiers, for each answer.
    """
    uses = list(_uses(asked))
    last: dict[Any, int] = {}
    until = [-1] * len(uses)
    for at in range(len(uses) - 1, -1, -1):
        page, counts = uses[at]
        until[at] = last.get(page, -1)
        last[page] = at if counts else -1  # what is published needs not have been kept
    return [asked.page_tokens * _packed(until, capacity) for capacity in capacities]


def _packed(until: Sequence[int], capacity: int) -> int:
    """Spans ``at .. until[at]``, none where it is -1, that fit into so many places."""
    kept: set[int] = set()  # ends of those that are open
    latest: list[int] = []
    found = 0
    for at, end in enumerate(until):
        if at in kept:
            kept.remove(at)
            found += 1
        if end >= 0:
            kept.add(end)
            heapq.heappush(latest, -end)
        if len(kept) > capacity:
            kept.remove(-heapq.heappop(latest))
    return found


def _uses(asked: Asked) -> Iterator[tuple[Any, bool]]:
    """Pages in the order in which they were asked for or published, and whether they were asked
    for."""
    for kind, *values in asked.events:
        if kind in (DOES.BEGIN, DOES.PUBLISH):
            for page in values[-1]:
                yield page, kind == DOES.BEGIN
