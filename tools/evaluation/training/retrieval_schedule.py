"""Schedule of a training run: length of sequences and learning rate at each moment."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A share of the run's time spent on batches of one shape.

    Attributes:
        length: tokens of a sequence.
        rows: sequences in a batch.
        share: share of the run's time, between 0 and 1.
    """

    length: int
    rows: int
    share: float


STANDARD = (
    Stage(512, 256, 0.30),
    Stage(2048, 64, 0.25),
    Stage(8192, 16, 0.25),
    Stage(16384, 8, 0.20),
)
LONG = (
    Stage(512, 256, 0.28),
    Stage(2048, 64, 0.22),
    Stage(8192, 16, 0.20),
    Stage(16384, 8, 0.15),
    Stage(32768, 4, 0.15),
)
TINY = (Stage(96, 8, 0.5), Stage(192, 4, 0.5))


@dataclass(frozen=True)
class Schedule:
    """Stages and learning rate as functions of the share of the time that has passed.

    Attributes:
        stages: in order; their shares add up to 1.
        peak: learning rate after the warm-up.
        warmup: share of the time during which the rate rises linearly from 0 to the peak.
        floor: the rate at the end as a share of the peak; a cosine leads there.
    """

    stages: tuple[Stage, ...]
    peak: float = 2e-3
    warmup: float = 0.02
    floor: float = 0.02

    def __post_init__(self) -> None:
        total = sum(stage.share for stage in self.stages)
        if not math.isclose(total, 1.0):
            raise ValueError(f"the shares of the stages must add up to 1, got {total}")

    def stage(self, fraction: float) -> Stage:
        """Return the stage at ``fraction`` of the time; the last one from its beginning on."""
        end = 0.0
        for stage in self.stages:
            end += stage.share
            if fraction < end:
                return stage
        return self.stages[-1]

    def rate(self, fraction: float) -> float:
        """Return the learning rate at ``fraction`` of the time."""
        if fraction < self.warmup:
            return self.peak * fraction / self.warmup
        along = min(1.0, (fraction - self.warmup) / (1 - self.warmup))
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * along)) / 2)
