"""Scores of a model of the mixture: tasks of ``topkv eval``, dense, greedy, by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from topkv_evaluation.eval.catalogue import Catalogue
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.tasks import Question, Task
from topkv_evaluation.tasks.ruler import MADE
from topkv_evaluation.tasks.splits import TUNING

WORDS = ("facts", *(f"ruler:{name}" for name in MADE), "near_keys", "walk")
METHOD = (
    "Stock Transformers, dense attention, greedy. Questions are those of `topkv eval` of the split"
    f" '{TUNING}', and so is their scoring: of several answers the share that is found counts."
)
BATCH = 16


@torch.inference_mode()
def right(model: PreTrainedModel, task: Task) -> float:
    """Return the mean score of a task's questions."""
    total = 0.0
    for first in range(0, len(task.questions), BATCH):
        asked = task.questions[first : first + BATCH]
        for question, row in zip(asked, _generated(model, task, asked), strict=True):
            total += task.score(question, row[: question.new_tokens])
    return total / len(task.questions)


def _generated(model: PreTrainedModel, task: Task, asked: Sequence[Question]) -> list[list[int]]:
    """Generate tokens behind each question, all together, padded on the left."""
    prompts = [[*task.contexts[q.context], *q.tokens] for q in asked]
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts],
                        device=model.device)  # fmt: skip
    most = max(question.new_tokens for question in asked)
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=most, do_sample=False)
    return [list(row) for row in found[:, width:].tolist()]


def scores(
    model: PreTrainedModel,
    folder: Path,
    words: Sequence[str],
    lengths: Sequence[int],
    questions: int,
) -> list[dict[str, Any]]:
    """Make a row for each task and length.

    Args:
        model: model as saved.
        folder: folder of its tokenizer.
        words: words of ``topkv eval --tasks``.
        lengths: lengths in tokens.
        questions: questions of each task and length.
    """
    rows = []
    options = Options(model=folder, contexts=lengths, questions=questions, per_context=questions)
    catalogue = Catalogue(model, options)
    for word in words:
        for task in catalogue.tasks([word]):
            row = {"task": word, "length": task.about["length"], "questions": questions}
            rows.append(row | {"right": round(right(model, task), 4)})
            print(f"{task.name}: {rows[-1]['right']:.1%}", flush=True)
    return rows
