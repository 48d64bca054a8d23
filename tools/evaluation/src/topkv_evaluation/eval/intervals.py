"""Intervals for shares that were counted, and for means over contexts."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


def wilson(correct: float, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of Wilson (1927) for a share of independent trials.

    Unlike the normal approximation it stays within 0 and 1, and has a width at 0 % and 100 %.

    Args:
        correct: trials that succeeded; a sum of scores from 0 to 1 varies less than as many of
            them, so its interval is rather too wide.
        total: all trials, at least 1.

    Raises:
        ValueError: a number is out of its range.
    """
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"expected 0 <= correct <= total and total >= 1, got {correct}, {total}")
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, spread = correct / total, z * z / total
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = ((middle + sign * half) / (1 + spread) for sign in (-1, 1))
    # Rounding must not part an interval from its end at 0 and at 1.
    return (0.0 if correct == 0 else low), (1.0 if correct == total else high)


def bootstrap(values: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a mean (Efron, 1979), which draws contexts.

    Questions about one context share its text, so they are drawn together. The draws are the same
    every time.

    Args:
        values: the context of each question, and its measured value.

    Returns:
        None if there are fewer than two contexts, whose spread is unknown then.
    """
    contexts = sorted({context for context, _ in values})
    if len(contexts) < 2:
        return None
    place = {context: index for index, context in enumerate(contexts)}
    sums, counts = np.zeros(len(contexts)), np.zeros(len(contexts))
    for context, value in values:
        sums[place[context]] += value
        counts[place[context]] += 1
    drawn = np.random.default_rng(0).integers(len(contexts), size=(RESAMPLES, len(contexts)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of values; None if there are none."""
    return sum(values) / len(values) if values else None


def by_context(values: Sequence[tuple[int, float]]) -> list[float]:
    """Return the mean of each context, in their order."""
    of: dict[int, list[float]] = {}
    for context, value in values:
        of.setdefault(context, []).append(value)
    return [sum(of[context]) / len(of[context]) for context in sorted(of)]


def spread(name: str, values: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """Return a mean over questions and its interval over contexts, by a row's field names."""
    interval = bootstrap(values)
    low, high = interval or (None, None)
    average = mean([value for _, value in values])
    return {name: average, f"{name}_low": low, f"{name}_high": high}
