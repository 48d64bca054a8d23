"""Instances of plugins against each other; reasons are given, none raised."""

from __future__ import annotations

from topkv.config.lowered import LoweredGroup
from topkv.hooks.algorithm import Algorithm
from topkv.hooks.backend import Backend
from topkv.plugins.contract import has_hook


def pair_reasons(
    algorithm: Algorithm, backend: Backend, named: str, group: LoweredGroup
) -> list[str]:
    """Reasons against an algorithm with the backend ``named`` that only instances can give."""
    reasons, name = [], group.algorithm
    if has_hook(algorithm, "correct") and (group.regrained or group.indexed):
        reasons.append(
            f"{name} selects single tokens of units that are attended whole, and what is "
            "corrected for (correct) is what no attended unit holds; leave that stage out, or "
            "set unit to 1"
        )
    if has_hook(algorithm, "retrieve_prompt") and not has_hook(backend, "prefill_selected"):
        reasons.append(
            "the algorithm selects for the rows of a prompt too (retrieve_prompt), and backend "
            f"{named} has no prefill_selected; choose another backend"
        )
    if has_hook(algorithm, "correct") and group.selecting != group.shape.layers:
        reasons.append(
            f"{name} corrects what was attended (correct), by what it keeps of every layer, "
            "and some layers share a selection and keep nothing; leave one of the two out"
        )
    least = algorithm.spec().ring_tokens
    ring = group.selected_as.ring_slots * group.selected_as.unit
    if ring < least:
        reasons.append(
            f"{name} reads a ring of at least {least} tokens, got {ring}; raise "
            f"ring_tokens to {least}"
        )
    return reasons


def undo_reasons(undo: int | None, group: LoweredGroup, queries: int) -> list[str]:
    """The reason against drafts that an algorithm could not take back."""
    if undo is None or undo >= queries - 1:
        return []
    return [
        f"{group.algorithm} can take back the last {undo} tokens of what it accumulates, and of "
        f"{queries} tokens of a row {queries - 1} may be rejected; lower max_queries to {undo + 1}"
    ]
