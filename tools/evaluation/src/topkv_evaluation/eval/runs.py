"""One cell: contexts read, questions decoded over forks, answers and attention mass counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import starmap
from time import perf_counter
from typing import Any

from topkv_evaluation.eval import recall
from topkv_evaluation.eval.batches import answer, fork_rows, read_contexts
from topkv_evaluation.eval.intervals import wilson
from topkv_evaluation.eval.tasks import Question, Task
from topkv_evaluation.measured import stats_of
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel

CHUNK = {"cuda": 8192}
CPU_CHUNK = 1024
SAMPLES = 8
"""Questions whose attention mass is looked at."""

Row = dict[str, Any]


class Run:
    """One cell over an attached model, which has room for it.

    Args:
        handle: the attached model.
        task: contexts and questions.
        budget: attended tokens of a lane; the longest context where all layers are dense.
        batch: questions that are decoded together.

    Attributes:
        answers: tokens of each answer so far.
        recall: mass of the selections and of the best tokens; None if all layers are dense.
        index: tokens of keys and values that a step reads as representations.
    """

    def __init__(self, handle: AttachedModel, task: Task, budget: int, batch: int) -> None:
        self.handle, self.task, self.budget, self.batch = handle, task, budget, batch
        self.coordinator = handle.coordinator
        self.paths = recall.watch(self.coordinator)
        self.answers: list[list[int]] = []
        self.moved: Counter[str] = Counter()
        self.recall: tuple[float, float] | None = None
        self.index = 0.0
        self.decode_seconds = 0.0

    def all(self) -> None:
        """Read the contexts, then decode all questions, a batch at a time."""
        task = self.task
        chunk = CHUNK.get(self.handle.model.device.type, CPU_CHUNK)
        parents = read_contexts(self.handle, task.contexts, chunk)
        for first in range(0, len(task.questions), self.batch):
            questions = task.questions[first : first + self.batch]
            rows = fork_rows(self.handle, [parents[q.context] for q in questions])
            began = perf_counter()
            starts = [len(task.contexts[question.context]) for question in questions]
            # The last token of the first question: later rows of the same length are as far.
            probe = len(questions[0].tokens) - 1 if self.paths and first == 0 else -1
            what = (self.handle, rows, starts, questions)
            after = partial(self._look, probe, rows, questions)
            self.answers += answer(*what, after, partial(self._arm, probe))
            self.decode_seconds += perf_counter() - began
            moved = self.coordinator.transfers_of(rows.slots)
            self.moved += Counter(hits=moved.hits, misses=moved.misses)
            rows.close()

    def _arm(self, probe: int, step: int) -> None:
        if step == probe:
            recall.arm(self.paths, True)

    def _look(
        self, probe: int, cache: TopkvCache, questions: Sequence[Question], step: int
    ) -> None:
        """After the step ``probe``: what the selections held, and what they had to read."""
        if step != probe:
            return
        recall.arm(self.paths, False)
        alike = [i for i, q in enumerate(questions) if len(q.tokens) == probe + 1]
        rows = alike[:: -(-len(alike) // SAMPLES)]
        what = (self.coordinator, self.paths, cache.slots, rows, self.budget)
        self.recall = recall.recall_of(*what)
        lengths = [self.coordinator.length(cache.slots[row]) for row in rows]
        tokens = [recall.index_tokens(self.paths, length) for length in lengths]
        self.index = sum(tokens) / len(tokens)

    def row(self) -> Row:
        """What was measured, see the README for the names."""
        task, context = self.task, self.task.length
        pairs = zip(task.questions, self.answers, strict=True)
        correct, total = sum(starmap(task.is_right, pairs)), len(task.questions)
        low, high = wilson(correct, total)
        memory, units = self.coordinator.memory(), self.moved.total()
        return {
            "budget_percent": round(100 * self.budget / context, 4),
            "index_tokens": round(self.index, 3),
            "with_index_percent": round(100 * (self.budget + self.index) / context, 4),
            "questions": total,
            "correct": correct,
            "accuracy": correct / total,
            "ci_low": low,
            "ci_high": high,
            "recall": self.recall[0] if self.recall else None,
            "exact_recall": self.recall[1] if self.recall else None,
            "hit_rate": self.moved["hits"] / units if units else None,
            "selected_units": units,
            "loaded_units": self.moved["misses"],
            "requests": self.coordinator.config.max_requests,
            "device_kv_bytes": memory.device_kv,
            "representation_bytes": memory.representation,
            "metadata_bytes": memory.metadata,
            "host_kv_bytes": memory.host,
            "decode_seconds": round(self.decode_seconds, 3),
            "impl": self.coordinator.config.impl,
            "backend": self.coordinator.config.backend,
            "device": str(self.coordinator.config.device),
            "dtype": str(self.coordinator.model.dtype).removeprefix("torch."),
            "stats": stats_of(self.handle),
        }
