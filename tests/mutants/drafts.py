"""Mutants of the coordinator that show where rows append several tokens in a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent
from typing import Any

from tests.machines.scenarios import drafts_are_appended_and_rejected
from tests.mutants.lifecycle import LifecycleMutant, Run, scenario
from topkv.decode.lanes import LaneBuffers
from topkv.decode.layers import LayerPath
from topkv.kv.step import StepUploader
from topkv.requests.requests import Requests

DRAFTS = scenario(drafts_are_appended_and_rejected, queries=3, page=4)
EXACT = scenario(drafts_are_appended_and_rejected, queries=3, page=4, verification="exact")


def changed(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return the method with other words in its source."""
    source = dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{method.__name__} has {old!r} {source.count(old)} times"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), method.__globals__, made)
    found: Callable[..., Any] = made[method.__name__]
    return found


def _mutant(
    name: str, owner: type, method: str, old: str, new: str, run: Run = DRAFTS
) -> LifecycleMutant:
    return LifecycleMutant(name, owner, method, changed(getattr(owner, method), old, new), run)


MUTANTS = [
    _mutant(
        "units that new tokens are in can be selected too",
        *(StepUploader, "_fill", "lengths - np.maximum(appended, 1, out=values[6])"),
        "lengths - np.maximum(appended, 1, out=values[6]).clip(max=1)",
    ),
    _mutant(
        "a row counts one token however many it appends",
        *(Requests, "_counted", "length += appended", "length += appended > 0"),
    ),
    _mutant(
        "a step leases the page of a row's first token alone",
        *(Requests, "own_pages", "length[writers] + forward.drafted", "length[writers]"),
    ),
    _mutant(
        "of several requests the last is rolled back alone",
        *(Requests, "_cut", "self.length[slots] = lengths"),
        "self.length[slots[-1:]] = lengths[-1:]",
    ),
    _mutant(
        "queries that are padding are answered",
        *(LaneBuffers, "_narrow", "self.rows.queries if queries > 1 else None", "None"),
    ),
    _mutant(
        "a query that selects for itself sees the tokens behind it",
        *(StepUploader, "upload", "counted[0] - (last - query)", "counted[0]", EXACT),
    ),
    _mutant(
        "a query that a row lacks selects for it",
        *(StepUploader, "upload", "there = last >= query", "there = last >= 0", EXACT),
    ),
    _mutant(
        "all queries of a row select as the first",
        *(LayerPath, "turns", "[(path, slice", "[(self.singles[0], slice", EXACT),
    ),
    _mutant(
        "a query has the rows of its request's first",
        *(LayerPath, "turns", "slice(query, rows, queries)", "slice(0, rows, queries)", EXACT),
    ),
]
