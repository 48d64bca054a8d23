"""Logits beside those of dense attention, with the same tokens fed to both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from topkv_evaluation.eval.tasks import Question, Task


@dataclass(frozen=True)
class Compared:
    """Means over the tokens of a question's reference.

    Attributes:
        kl: KL divergence of the logits from those of dense attention, in nats.
        nll: negative log-likelihood of the reference, in nats a token.
        nll_change: ``nll`` minus that of dense attention.
        agreement: share of the tokens where both have the same best one.
    """

    kl: float
    nll: float
    nll_change: float
    agreement: float


def compare(logits: Tensor, dense: Tensor, targets: Sequence[int]) -> Compared:
    """Compare logits with dense attention's log-probabilities, both ``[positions, V]``.

    In float64: differences of near equal distributions are what is looked for.
    """
    both = (logits.double(), dense.to(logits.device).double())
    ours, theirs = (each.log_softmax(-1) for each in both)
    wanted = torch.tensor(targets, device=logits.device)[:, None]
    nll, before = (-each.gather(-1, wanted).mean() for each in (ours, theirs))
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    agreed = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    return Compared(float(kl), float(nll), float(nll - before), float(agreed))


@dataclass
class Forced:
    """Some questions of a task whose references are fed, with dense attention's logits.

    Attributes:
        questions: questions to compare, spread over the task.
        dense: log-probabilities ``[targets, V]`` in float32 on the CPU, by question.
    """

    questions: tuple[Question, ...]
    dense: dict[Question, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task, most: int) -> Forced:
        """Choose at most ``most`` questions that have a reference."""
        fit = [question for question in task.questions if question.targets]
        stride = -(-len(fit) // most) if most else len(fit) + 1
        return cls(tuple(dict.fromkeys(fit[::stride])) if most else ())

    @property
    def known(self) -> bool:
        """True if the logits of dense attention are there."""
        return len(self.dense) == len(self.questions)

    def keep(self, question: Question, logits: Tensor) -> Compared:
        """Keep logits of dense attention ``[targets, V]``, and compare them with themselves."""
        self.dense[question] = logits.float().log_softmax(-1).cpu()
        return compare(logits, logits, question.targets)
