"""Rows of a run: a cell, its state, and what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topkv_bench.contestants import NAMES

OK, OVER, NO_MEMORY, REFUSED = "ok", "over the limit", "out of memory", "refused"
"""States of a cell."""

Row = dict[str, Any]


def link(moved: Sequence[Any], steps: int) -> Row:
    """Return hits and bytes of the timed steps, from counts before and after them."""
    before, after = moved
    if after is None:
        return {"hit_rate": None, "misses_per_step": None, "link_bytes_per_step": None}
    hits, misses = after.hits - before.hits, after.misses - before.misses
    loaded = after.loaded_bytes - before.loaded_bytes
    return {
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "misses_per_step": misses / steps,
        "link_bytes_per_step": loaded / steps,
    }


def within_limit(rows: list[Row], limit: int) -> list[Row]:
    """Return for each contestant and context, and each number of queries and acceptance, the row
    of most requests whose device bytes stay within a limit; those without such a row are left
    out."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        more = row.get("queries") or 0, row.get("accept") or 0.0
        key = row["contestant"], row["context"], *more
        held = best.get(key)
        fits = row["status"] == OK and row["bytes"]["device"] <= limit
        if fits and (held is None or row["requests"] > held["requests"]):
            best[key] = row
    order = sorted(best, key=lambda key: (key[1], NAMES.index(key[0]), *key[2:]))
    return [best[key] for key in order]
