"""Prompts that are read once and densely, and whose ends and answers are decoded sparsely."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv_evaluation.eval.batches import (
    decode,
    forced_logits,
    fork_rows,
    groups_of,
    read_context,
    settle,
)
from topkv_evaluation.eval.cells import PAGE, room_for
from topkv_evaluation.eval.tasks import Question, Task
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel

CHUNK = 2048

Parents = dict[int, tuple[TopkvCache, Tensor]]
"""Cache of each context, and the logits ``[V]`` behind the context."""


@dataclass(frozen=True)
class Asked:
    """One request of the harness, as tokens.

    Attributes:
        context: what is read densely, at least one token.
        question: what is decoded sparsely before the answer; may be empty.
        answer: tokens that are scored; empty where tokens are generated.
        new_tokens: tokens that are generated, at most.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...] = ()
    new_tokens: int = 0


@dataclass(frozen=True)
class Decoder:
    """Answers requests through topkv, a batch at a time.

    Attributes:
        model: the model, which is attached only during a call.
        settings: settings of ``SparseConfig``; sizes that are not set are made to fit.
        unit: tokens that are selected together.
        batch: requests that are decoded together.
    """

    model: PreTrainedModel
    settings: dict[str, Any] = field(default_factory=dict)
    unit: int = 16
    batch: int = 1

    def score(self, asked: Sequence[Asked]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each answer, and True if all of its tokens are the best."""

        def run(handle: AttachedModel, questions: list[Question], parents: Parents) -> list[Any]:
            contexts = [parents[q.context][0] for q in questions]
            found = forced_logits(handle, task, questions, contexts)
            # The logits before the first token of an answer may be those behind the context.
            ahead = [[] if q.tokens else [parents[q.context][1]] for q in questions]
            return [
                _scored(torch.stack([*first, *logits]), q.reference)
                for first, logits, q in zip(ahead, found, questions, strict=True)
            ]

        task, order = _task(asked)
        return self._each(task, order, run)

    def generate(
        self, asked: Sequence[Asked], ended: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """Generate each answer greedily, until ``ended`` is True for all answers of a batch."""

        def run(handle: AttachedModel, questions: list[Question], parents: Parents) -> list[Any]:
            best = [int(parents[q.context][1].argmax()) for q in questions]
            known = [[] if q.tokens else [first] for q, first in zip(questions, best, strict=True)]
            given = [q.tokens or (first,) for q, first in zip(questions, best, strict=True)]
            steps = max(len(q.tokens) + q.new_tokens - 1 for q in questions)
            if steps < 1:
                return known

            def answers(written: Sequence[Sequence[int]]) -> list[list[int]]:
                rows = zip(known, written, given, questions, strict=True)
                return [
                    [*first, *row[len(fed) - 1 :]][: q.new_tokens] for first, row, fed, q in rows
                ]

            def enough(written: Tensor) -> bool:
                return all(map(ended, answers(written.t().tolist())))

            rows = fork_rows(handle, [parents[q.context][0] for q in questions])
            starts = [len(task.contexts[q.context]) for q in questions]
            found = decode(handle, rows, starts, given, steps, ended=enough)
            rows.close()
            return answers(found)

        task, order = _task(asked)
        return self._each(task, order, run)

    def _each(
        self,
        task: Task,
        order: Sequence[int],
        run: Callable[[AttachedModel, list[Question], Parents], list[Any]],
    ) -> list[Any]:
        """Call ``run`` with the questions of a task; results are in the order of the requests."""
        results: list[Any] = []
        with torch.inference_mode(), self._attached(task) as handle:
            for group in groups_of(task, self.batch):
                parents: Parents = {}
                for index in dict.fromkeys(question.context for question in group):
                    parents[index] = read_context(handle, task.contexts[index], CHUNK)
                settle(handle, [cache for cache, _ in parents.values()])
                for first in range(0, len(group), self.batch):
                    results += run(handle, group[first : first + self.batch], parents)
                for cache, _ in parents.values():
                    cache.close()
        by_place = dict(zip(order, results, strict=True))
        return [by_place[place] for place in range(len(order))]

    @contextmanager
    def _attached(self, task: Task) -> Iterator[AttachedModel]:
        room = room_for(task, self.batch, max(PAGE, self.unit))
        settings = {**room, **self.settings, "unit": self.unit}
        # More than a request can reach is no budget.
        reach = room["max_request_tokens"]
        for name in ("budget", "buffer"):
            if settings.get(name) is not None:
                settings[name] = min(settings[name], reach)
        with attach(self.model, SparseConfig(**settings), engine="transformers") as handle:
            yield handle


def _scored(logits: Tensor, answer: Sequence[int]) -> tuple[float, bool]:
    """Score an answer by the logits ``[tokens, V]`` before each of its tokens."""
    wanted = torch.tensor(answer, device=logits.device)
    likely = logits.float().log_softmax(-1).gather(-1, wanted[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == wanted).all())


def _task(asked: Sequence[Asked]) -> tuple[Task, list[int]]:
    """Make questions of requests, by context; return each one's place among the requests too."""
    alone = dict.fromkeys(each.context for each in asked)
    contexts = {context: place for place, context in enumerate(alone)}
    order = sorted(range(len(asked)), key=lambda place: contexts[asked[place].context])
    questions = tuple(
        Question(contexts[each.context], each.question, each.new_tokens, reference=each.answer)
        for each in (asked[place] for place in order)
    )
    return Task("requests", tuple(contexts), questions, str), order
