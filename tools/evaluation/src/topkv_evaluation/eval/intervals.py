"""Intervals for shares that were counted."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def wilson(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of Wilson (1927) for a share of independent trials.

    Unlike the normal approximation it stays within 0 and 1, and has a width at 0 % and 100 %.

    Args:
        correct: trials that succeeded.
        total: all trials, at least 1.
        confidence: between 0 and 1.

    Raises:
        ValueError: a number is out of its range.
    """
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"expected 0 <= correct <= total and total >= 1, got {correct}, {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = correct / total, z * z / total
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = ((middle + sign * half) / (1 + spread) for sign in (-1, 1))
    # Rounding must not part an interval from its end at 0 and at 1.
    return (0.0 if correct == 0 else low), (1.0 if correct == total else high)
