"""Patterns of sharing that lose least in all, from the loss of each pair of layers."""

from __future__ import annotations

from collections.abc import Sequence


def best_patterns(losses: Sequence[Sequence[float]]) -> list[str]:
    """Return the pattern that loses least for each number of selecting layers, from one on.

    A layer shares with the nearest selecting one before it, so a pattern is a row of runs, each
    of which begins with a layer that selects; the first layer always does. The best pattern of
    n runs up to a layer is the best one of n - 1 runs up to an earlier layer, and one run more.

    Args:
        losses: ``losses[f][s]`` is the loss of layer s with the selection of layer f, for
            f <= s.

    Returns:
        Values of the setting ``share``, a letter for each layer. Of equally good ones the first
        by alphabet, which selects sooner.
    """
    count, found = len(losses), []
    best = {0: (0.0, "")}  # by layers that are behind: what they lose, and their pattern
    for _ in range(count):
        longer: dict[int, tuple[float, str]] = {}
        for first, (loss, text) in best.items():
            for end in range(first + 1, count + 1):
                loss += losses[first][end - 1]
                each = (loss, text + "F".ljust(end - first, "S"))
                longer[end] = min(longer.get(end, each), each)
        found.append(longer[count][1])
        best = longer
    return found


def sources_of(pattern: str) -> list[int]:
    """Return the layer whose selection each layer uses: itself, or the nearest before it."""
    return [pattern.rindex("F", 0, layer + 1) for layer in range(len(pattern))]
