"""Upper bound of the tokens that any policy finds in N pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from topkv_simulate.asked import DOES, Asked


def most_found(asked: Asked, capacities: Sequence[int]) -> list[int]:
    """Return the most tokens of prompts that tiers of N pages together can find.

    A page that is found was asked for or published before, and was kept since then: a span of
    events. Where more spans overlap than there is room for, the one that lasts longest is dropped,
    which keeps as many as possible (Belady 1966). Prompts find only pages without a hole before
    them, and running requests hold pages, so this is no policy, and none finds more.

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
        last[page] = at if counts else -1  # a page that is published need not have been kept
    return [asked.page_tokens * _packed(until, capacity) for capacity in capacities]


def _packed(until: Sequence[int], capacity: int) -> int:
    """Count spans ``at .. until[at]`` that fit into N places; -1 is no span."""
    kept: set[int] = set()  # ends of the open spans
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
    """Yield pages in the order in which they were asked for or published, with True if they were
    asked for."""
    for kind, *values in asked.events:
        if kind in (DOES.BEGIN, DOES.PUBLISH):
            for page in values[-1]:
                yield page, kind == DOES.BEGIN
