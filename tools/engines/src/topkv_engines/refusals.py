"""Reasons against algorithms that every engine of this kind has."""

from __future__ import annotations

from collections.abc import Sequence

from topkv.config import LoweredConfig
from topkv.hooks.algorithm import AlgorithmSpec


def room_reasons(limit: int, longest: int, argument: str) -> list[str]:
    """Reason against algorithms that could run out of room in the middle of a step.

    Args:
        limit: tokens after a prompt that every algorithm has room for.
        longest: tokens of the longest request.
        argument: of the engine that says so.
    """
    if limit >= longest:
        return []
    return [
        f"an algorithm has room for {limit} tokens after a prompt, and a request may generate "
        f"{longest - 1} within {argument} = {longest}; raise its parameter 'generated' to that, "
        f"or lower {argument}"
    ]


def prefix_reasons(
    lowered: LoweredConfig, specs: Sequence[AlgorithmSpec | None], cache: str, hint: str
) -> list[str]:
    """Reasons against algorithms that need more of a prompt than its pages, which are shared.

    Args:
        lowered: configuration of the coordinator.
        specs: of its groups; None for dense ones.
        cache: of prefixes, as the engine calls it.
        hint: argument that turns it off.
    """
    reasons: dict[str, None] = {}
    for group, spec in zip(lowered.groups, specs, strict=True):
        if spec is None or (spec.prefix == "pages" and not spec.prompt_tail):
            continue
        why = "keeps more of a prompt than what stands in its pages"
        if spec.prefix == "pages":
            why = f"looks at the queries of the last {spec.prompt_tail} tokens of a prompt"
        reasons[f"{cache}: {group.algorithm} {why}; say {hint}"] = None
    return [*reasons]
