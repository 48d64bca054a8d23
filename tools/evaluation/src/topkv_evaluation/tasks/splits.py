"""Two splits of the questions that are made: one to choose by, one to report on."""

from __future__ import annotations

from collections.abc import Mapping

from topkv.errors import ConfigError

TUNING, REPORTING = "tuning", "reporting"
MOST = 1 << 29
"""Upper bound of the seeds of a run, and of the numbers of contexts that are added to one."""

STARTS: Mapping[str, int] = {TUNING: 0, REPORTING: 1 << 31}
"""First seed of each split: more than twice ``MOST`` apart, and within 32 bits."""


def seed_of(split: str, seed: int) -> int:
    """Return the seed of a generator for ``seed`` of a run; splits have no seed in common.

    Raises:
        ConfigError: there is no such split, or the seed is too large for one.
    """
    reasons = []
    if split not in STARTS:
        reasons.append(f"expected the split {TUNING} or {REPORTING}, got {split!r}")
    if not 0 <= seed < MOST:
        reasons.append(f"seeds go from 0 to {MOST - 1}, got {seed}")
    if reasons:
        raise ConfigError("no questions can be made", reasons)
    return STARTS[split] + seed
