"""From what each pair of layers loses by sharing to the patterns that lose least in all."""

from __future__ import annotations

from collections.abc import Sequence


def best_patterns(losses: Sequence[Sequence[float]]) -> list[str]:
    """For each number of selecting layers, one to all of them, the pattern that loses least.

    A layer shares with the nearest selecting one before it, so a pattern is a row of runs, each
    of which begins with a layer that selects; the first layer always does. The best pattern of
    n runs up to a layer is the best one of n - 1 runs up to an earlier layer, and one run more.

    Args:
        losses: ``losses[f][s]`` is what layer s loses where it attends to what layer f has
            selected, for f <= s.

    Returns:
        Values of the setting ``share``, as long as there are layers. Of equal ones the first by
        alphabet: that which selects sooner.
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
    """The layer whose selection each layer attends to: itself, or the nearest before it."""
    return [pattern.rindex("F", 0, layer + 1) for layer in range(len(pattern))]
