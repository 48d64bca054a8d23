"""Instances of plugins against each other; reasons are given, none raised."""

from __future__ import annotations

from topkv.config.lowered import LoweredConfig, LoweredGroup
from topkv.hooks.algorithm import Algorithm
from topkv.hooks.backend import Backend
from topkv.plugins.contract import has_hook


def pair_reasons(
    algorithm: Algorithm, backend: Backend, config: LoweredConfig, group: LoweredGroup
) -> list[str]:
    """Reasons against an algorithm with a backend, and with the drafts and the ring of its group,
    that only instances can give."""
    reasons, name, spec = [], group.algorithm, algorithm.spec()
    if has_hook(algorithm, "correct") and (group.regrained or group.indexed):
        reasons.append(
            f"{name} selects single tokens of units that are attended whole, and what is "
            "corrected for (correct) is what no attended unit holds; leave that stage out, or "
            "set unit to 1"
        )
    if has_hook(algorithm, "retrieve_prompt") and not has_hook(backend, "prefill_selected"):
        reasons.append(
            "the algorithm selects for the rows of a prompt too (retrieve_prompt), and backend "
            f"{config.backend} has no prefill_selected; choose another backend"
        )
    if has_hook(algorithm, "correct") and group.selecting != group.shape.layers:
        reasons.append(
            f"{name} corrects what was attended (correct), by what it keeps of every layer, "
            "and some layers share a selection and keep nothing; leave one of the two out"
        )
    least, queries = spec.ring_tokens, config.max_queries
    ring = group.selected_as.ring_slots * group.selected_as.unit
    if ring < least:
        reasons.append(
            f"{name} reads a ring of at least {least} tokens, got {ring}; raise "
            f"ring_tokens to {least}"
        )
    if spec.undo is not None and spec.undo < queries - 1:
        reasons.append(
            f"{name} can take back the last {spec.undo} tokens of what it accumulates, and of "
            f"{queries} tokens of a row {queries - 1} may be rejected; lower max_queries to "
            f"{spec.undo + 1}"
        )
    return reasons
