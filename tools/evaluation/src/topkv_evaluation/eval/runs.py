"""Run of one cell: contexts are read, questions decoded over forks, and results counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from topkv_evaluation.eval import recall
from topkv_evaluation.eval.batches import decode, forced_logits, fork_rows, groups_of, settle
from topkv_evaluation.eval.forced import Compared, Forced, compare
from topkv_evaluation.eval.intervals import by_context, mean, spread, wilson
from topkv_evaluation.eval.prefills import Prefills
from topkv_evaluation.eval.tasks import Question, Task
from topkv_evaluation.measured import stats_of
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel

PAIRED = ("kl", "nll_change")
"""Fields whose mean of each context rows keep, so that cells are compared by context."""

CHUNK = {"cuda": 8192}
CPU_CHUNK = 1024
SAMPLES = 8
"""About this many questions are sampled for their attention mass."""

Row = dict[str, Any]
Advance = Callable[[int], None]
"""Called with the number of questions that have been answered since."""


class Run:
    """One cell over an attached model, which has room for it.

    Args:
        handle: the attached model.
        task: contexts and questions.
        budget: attended tokens of a lane; the longest context where all layers are dense.
        batch: questions that are decoded together.
        forced: questions whose logits are compared, if any; where all layers are dense it keeps
            their logits.
        prefills: contexts that another cell has read; by default each is read anew.

    Attributes:
        answers: tokens of each answer so far.
        looks: contexts of sampled questions and looks at their selections; none if all layers
            are dense.
        compared: contexts of forced questions and differences of their logits.
        read: bytes read from device memory for a token, of each sampled question.
    """

    def __init__(
        self,
        handle: AttachedModel,
        task: Task,
        budget: int,
        batch: int,
        forced: Forced | None = None,
        prefills: Prefills | None = None,
    ) -> None:
        self.handle, self.task, self.budget, self.batch = handle, task, budget, batch
        self.forced, self.prefills = forced or Forced(()), prefills or Prefills(0)
        self.coordinator = handle.coordinator
        self.paths = recall.watch(self.coordinator)
        self.answers: list[list[int]] = []
        self.looks: list[tuple[int, recall.Look]] = []
        self.compared: list[tuple[int, Compared]] = []
        self.read: list[tuple[float, float, float]] = []
        self.moved: Counter[str] = Counter()
        self.decode_seconds = 0.0

    def all(self, advance: Advance = lambda questions: None) -> None:
        """Read the contexts, and decode all questions, a batch at a time."""
        groups = [*groups_of(self.task, self.batch)]
        batches = sum(-(-len(group) // self.batch) for group in groups)
        stride, per_batch, seen = -(-batches // SAMPLES), -(-SAMPLES // batches), 0
        parents: dict[int, tuple[TopkvCache, int]] = {}
        for group in groups:
            for cache, _ in parents.values():
                cache.close()
            parents = self._read_contexts(group)
            for first in range(0, len(group), self.batch):
                questions = group[first : first + self.batch]
                self._answer(questions, parents, 0 if seen % stride else per_batch)
                self._force([q for q in questions if q in self.forced.questions], parents)
                seen += 1
                advance(len(questions))

    def _read_contexts(self, group: Sequence[Question]) -> dict[int, tuple[TopkvCache, int]]:
        """Return the cache of each context, and the best token behind it."""
        chunk = CHUNK.get(self.handle.model.device.type, CPU_CHUNK)
        parents = {}
        for index in dict.fromkeys(question.context for question in group):
            parents[index] = self.prefills.read(self.handle, self.task, index, chunk)
        settle(self.handle, [cache for cache, _ in parents.values()])
        return parents

    def _starts(self, questions: Sequence[Question]) -> list[int]:
        return [len(self.task.contexts[question.context]) for question in questions]

    def _answer(
        self,
        questions: Sequence[Question],
        parents: dict[int, tuple[TopkvCache, int]],
        samples: int,
    ) -> None:
        """Decode a batch of questions and their answers, and look at some of them."""
        # Where a context ends with its question, the answer's first token is known already.
        known = [[] if q.tokens else [parents[q.context][1]][: q.new_tokens] for q in questions]
        given = [[*q.tokens] or [parents[q.context][1]] for q in questions]
        rows = fork_rows(self.handle, [parents[q.context][0] for q in questions])
        steps = max(0, *(len(q.tokens) + q.new_tokens - 1 for q in questions))
        # A question of plain text is only looked at.
        steps = max(steps, *map(len, given)) if samples else steps
        # The last token of the first question: later rows of the same length are as far.
        probe = len(given[0]) - 1 if samples else -1
        alike = [i for i, row in enumerate(given) if len(row) == probe + 1]
        sampled = alike[:: -(-len(alike) // samples)] if samples else []

        def before(step: int) -> None:
            if step == probe:
                recall.arm(self.paths, True)

        def after(step: int, logits: Tensor) -> None:
            if step == probe:
                recall.arm(self.paths, False)
                self._look([questions[i].context for i in sampled], rows, sampled)

        began = perf_counter()
        written = decode(
            self.handle, rows, self._starts(questions), given, steps, before, after, eager=probe
        )
        self.decode_seconds += perf_counter() - began
        for question, first, row, fed in zip(questions, known, written, given, strict=True):
            answer = [*first, *row[len(fed) - 1 :]]
            self.answers.append(answer[: question.new_tokens])
        self._count(rows, steps)
        rows.close()

    def _count(self, rows: TopkvCache, steps: int) -> None:
        """Add the transfers of rows that are done."""
        moved = self.coordinator.transfers_of(rows.slots)
        self.moved += Counter(
            hits=moved.hits,
            misses=moved.misses,
            bytes=moved.loaded_bytes,
            tokens=steps * len(rows.slots),
        )

    def _look(self, contexts: Sequence[int], cache: TopkvCache, rows: Sequence[int]) -> None:
        """Note what selections held and read, after the step of a probe."""
        looks = []
        if self.paths:
            what = (self.coordinator, self.paths, cache.slots, rows, self.budget)
            looks = recall.recall_of(*what)
            self.looks += zip(contexts, looks, strict=True)
        for place, row in enumerate(rows):
            length = self.coordinator.length(cache.slots[row])
            attended = looks[place].attended_bytes if looks else 0.0
            index, tokens = recall.index_read(self.paths, length)
            resident = recall.dense_read(self.coordinator, length, ("resident",))
            streamed = recall.dense_read(self.coordinator, length, ("streamed",))
            self.read.append((attended + index + resident, streamed, tokens))

    def _force(
        self, questions: Sequence[Question], parents: dict[int, tuple[TopkvCache, int]]
    ) -> None:
        """Feed the references, and compare the logits before them with those of dense attention.

        Nothing is compared where the latter are unknown; if all layers are dense, they are kept.
        """
        dense = not self.paths
        if not questions or not (dense or self.forced.known):
            return
        contexts = [parents[question.context][0] for question in questions]
        found = forced_logits(self.handle, self.task, questions, contexts, self._count)
        for question, kept in zip(questions, found, strict=True):
            logits = torch.stack(kept)
            if dense:
                compared = self.forced.keep(question, logits)
            else:
                compared = compare(logits, self.forced.dense[question], question.targets)
            self.compared.append((question.context, compared))

    def row(self) -> Row:
        """Return the measured fields of the row, see the README for the names."""
        task, context = self.task, self.task.length
        memory = self.coordinator.memory()
        units = self.moved["hits"] + self.moved["misses"]
        device, streamed, index = (fmean(each) for each in zip(*self.read, strict=True))
        moved = self.moved["bytes"] / self.moved["tokens"] if self.moved["tokens"] else 0.0
        whole = recall.dense_read(self.coordinator, context, ("resident", "streamed", "sparse"))
        return {
            "budget_percent": round(100 * self.budget / context, 4),
            "index_tokens": round(index, 3),
            "with_index_percent": round(100 * (self.budget + index) / context, 4),
            "device_bytes_per_token": round(device),
            "link_bytes_per_token": round(moved + streamed),
            "context_bytes": round(whole),
            "questions": len(task.questions),
            "contexts": len(task.contexts),
            **scores_of(task, self.answers),
            **spread("recall", [(c, look.held) for c, look in self.looks]),
            "exact_recall": mean([look.best for _, look in self.looks]),
            **differences_of(self.compared),
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


def scores_of(task: Task, answers: Sequence[Sequence[int]]) -> Row:
    """Score the tokens that were generated for each question of a task."""
    pairs = zip(task.questions, answers, strict=True)
    scores = [task.score(q, answer) for q, answer in pairs if q.answers]
    if not scores:
        return dict.fromkeys(("correct", "accuracy", "ci_low", "ci_high"))
    low, high = wilson(sum(scores), len(scores))
    return {
        "correct": round(sum(scores), 4),
        "accuracy": sum(scores) / len(scores),
        "ci_low": low,
        "ci_high": high,
    }


def differences_of(compared: Sequence[tuple[int, Compared]]) -> Row:
    """Sum up differences of forced questions by context; of dense attention they are zero."""
    row: Row = {"forced_questions": len(compared)}
    for name in ("kl", "nll", "nll_change", "agreement"):
        values = [(context, getattr(each, name)) for context, each in compared]
        row |= spread(name, values)
        if name in PAIRED:
            row[f"{name}_contexts"] = by_context(values)
    return row
