"""Plan of the training at each step: lengths, mixture, learning rate. Uses no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from mixture_documents import MAKERS, document
from torch import Tensor
from torch.utils.data import Dataset

KINDS = tuple(MAKERS)
MIDDLE = {
    "lookup": 2, "dense_facts": 2, "facts": 2, "chains": 3, "vt": 3, "needles": 4, "near_keys": 2,
    "walk": 2, "plain": 1,
}  # fmt: skip
WHOLE = {
    "lookup": 1, "facts": 3, "chains": 1, "vt": 5, "needles": 8, "near_keys": 3, "walk": 3,
    "counted": 2, "plain": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Steps on batches of one shape.

    Attributes:
        length: bytes of a document.
        rows: documents of a batch.
        steps: number of steps.
        weights: kinds of documents and how often each is drawn.
    """

    length: int
    rows: int
    steps: int
    weights: Mapping[str, int]


FURTHER = (
    Stage(512, 256, 2000, MIDDLE),
    Stage(1024, 128, 3000, MIDDLE),
    Stage(2048, 64, 3500, WHOLE),
    Stage(4096, 32, 3000, WHOLE),
    Stage(8192, 16, 1200, WHOLE),
    Stage(16384, 8, 400, WHOLE),
)
"""Stages for weights that can look back already: 131,072 tokens a step, 1.72 billion in all."""

STANDARD = (Stage(512, 256, 2500, {"facts": 1}), *FURTHER)
"""Stages with facts first, from which a model learns to look back; 2.04 billion tokens."""

LONG = (*STANDARD, Stage(32768, 4, 200, WHOLE))
"""Stages of a model that is asked about twice the context, too; 2.07 billion tokens."""

TINY = (Stage(96, 4, 6, {"lookup": 1, "chains": 1}), Stage(192, 2, 6, {"facts": 1, "plain": 1}))


@dataclass(frozen=True)
class Plan:
    """Everything of a run as a function of the number of the step.

    Attributes:
        stages: in order.
        seed: seed of all documents.
        peak: learning rate after the warm-up.
        warmup: steps during which the rate rises from 0 to the peak.
        floor: the rate at the end as a share of the peak; a cosine leads there.
    """

    stages: tuple[Stage, ...]
    seed: int
    peak: float = 2e-3
    warmup: int = 200
    floor: float = 0.02

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        return sum(stage.steps * stage.rows * stage.length for stage in self.stages)

    def scaled(self, by: float) -> Plan:
        """Return the plan with ``by`` times the steps in each stage."""
        stages = (replace(stage, steps=max(1, round(by * stage.steps))) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def stage(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError("the plan has no such step")

    def reaches(self, stage: Stage) -> int:
        """Return the first step behind a stage."""
        return sum(each.steps for each in self.stages[: self.stages.index(stage) + 1])

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        along = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * along)) / 2)


Batch = tuple[Tensor, Tensor, Tensor]
"""Bytes [B, n] uint8, marks of answers [B, n] bool, and kinds [B] int64."""


class Batches(Dataset[Batch]):
    """The batch of each step; the same number gives the same batch, in any process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> Batch:
        stage = self.plan.stage(step)
        name = f"mixture {self.plan.seed} {step}"
        kinds = random.Random(name).choices(
            [*stage.weights], weights=[*stage.weights.values()], k=stage.rows
        )
        made = [document(kind, f"{name} {i}", stage.length) for i, kind in enumerate(kinds)]
        shape = (stage.rows, stage.length)
        text, marks = (
            torch.from_numpy(np.frombuffer(b"".join(each), dtype=np.uint8).copy()).view(shape)
            for each in zip(*made, strict=True)
        )
        return text, marks.bool(), torch.tensor([KINDS.index(kind) for kind in kinds])
