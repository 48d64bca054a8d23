"""Samples that fill a length: the largest size of a haystack that fits, as RULER looks for it."""

from __future__ import annotations

from collections.abc import Callable

from topkv.errors import ConfigError
from topkv_evaluation.tasks.sample import Count, Sample

Make = Callable[[int], Sample]
"""Makes a sample with a haystack of N pieces; it draws, so no two are alike."""

Total = Callable[[int], int]
"""Returns the tokens of such a sample, generated ones included."""


def too_short(length: int, why: str) -> ConfigError:
    """Make the error of a length that holds no sample."""
    return ConfigError(f"no sample of {length} tokens can be made", [why])


def total_of(make: Make, count: Count) -> Total:
    """Return a function that counts the tokens of a fresh sample of a size."""

    def total(size: int) -> int:
        sample = make(size)
        return count(sample) + sample.new_tokens

    return total


def _largest(total: Total, most: int, low: int, high: int) -> int | None:
    best = None
    while low <= high:
        middle = (low + high) // 2
        if total(middle) <= most:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def largest_size(total: Total, most: int, step: int, bound: int, least: int) -> int:
    """Find the largest size whose sample has at most ``most`` tokens, by bisection.

    RULER begins at ``step``, and makes samples in vain if that does not fit. Here sizes down to
    ``least`` are tried before a length is refused.

    Args:
        total: called with sizes from ``least`` on.
        most: most tokens, generated ones included.
        step: the size that RULER begins with, in pieces of the haystack.
        bound: the largest size that is tried; two steps if that is more.
        least: the smallest size of which a sample can be made.

    Raises:
        ConfigError: not even the smallest one fits.
    """
    found = _largest(total, most, step, max(bound, 2 * step))
    found = found or _largest(total, most, least, step - 1)
    if found is None:
        raise too_short(most, f"the shortest has {total(least)}; ask for longer ones")
    return found


def fitted(make: Make, count: Count, most: int, size: int, step: int, least: int) -> Sample:
    """Make a sample of this size, or the next smaller one that fits: some draws are longer.

    Raises:
        ConfigError: none does.
    """
    while True:
        sample = make(size)
        tokens = count(sample) + sample.new_tokens
        if tokens <= most:
            return sample
        if size <= least:
            raise too_short(most, f"the shortest has {tokens}; ask for longer ones")
        size = size - step if size > step and size - step >= least else size - 1
