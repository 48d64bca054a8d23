"""Checks of plugins against each other that need their instances."""

from __future__ import annotations

from typing import Any

from topkv.config import LoweredGroup
from topkv.plugins.contract import has_hook


def pair_reasons(
    algorithm: Any, backend: object, names: tuple[str, str], group: LoweredGroup
) -> list[str]:
    """Return reasons against an algorithm with its backend that only the instances can give.

    Args:
        names: names of the algorithm and the backend.
        group: the group that they are for.
    """
    reasons = []
    if has_hook(algorithm, "correct") and (group.regrained or group.indexed):
        reasons.append(
            f"{names[0]} selects single tokens of units that are attended whole, and what is "
            "corrected for (correct) is what no attended unit holds; leave that stage out, or "
            "set unit to 1"
        )
    if has_hook(algorithm, "retrieve_prompt") and not has_hook(backend, "prefill_selected"):
        reasons.append(
            "the algorithm selects for the rows of a prompt too (retrieve_prompt), and backend "
            f"{names[1]} has no prefill_selected; choose another backend"
        )
    if has_hook(algorithm, "correct") and group.selecting != group.shape.layers:
        reasons.append(
            f"{names[0]} corrects what was attended (correct), by what it keeps of every layer, "
            "and some layers share a selection and keep nothing; leave one of the two out"
        )
    least = algorithm.spec().ring_tokens
    ring = group.selected_as.ring_slots * group.selected_as.unit
    if ring < least:
        reasons.append(
            f"{names[0]} reads a ring of at least {least} tokens, got {ring}; raise "
            f"ring_tokens to {least}"
        )
    return reasons
