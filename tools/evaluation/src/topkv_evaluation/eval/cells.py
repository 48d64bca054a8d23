"""The grid of a comparison: a cell for each task, algorithm, budget and set of dense layers."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv.errors import TopkvError
from topkv_evaluation.eval.batches import groups_of
from topkv_evaluation.eval.choices import Choice
from topkv_evaluation.eval.forced import Forced
from topkv_evaluation.eval.prefills import Prefills
from topkv_evaluation.eval.runs import Advance, Row, Run
from topkv_evaluation.eval.tasks import Task
from topkv_transformers.support import shape_of

PAGE = 64


@dataclass(frozen=True)
class Grid:
    """Everything that the cells have in common.

    Attributes:
        model: the model, not attached.
        backend, impl: as in ``SparseConfig``.
        batch: questions that are decoded together.
        forced: most questions of a task whose logits are compared.
        name: name of the model in results.
    """

    model: PreTrainedModel
    backend: str | None
    impl: str | None
    batch: int
    forced: int = 0
    name: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell; ``choice`` is None for the dense baseline, all of whose layers are dense.

    Attributes:
        task: contexts and questions.
        share: the budget as a share of the longest context.
        dense_layers: layers that attend to everything.
    """

    task: Task
    choice: Choice | None
    share: float
    dense_layers: tuple[int, ...]

    @property
    def label(self) -> str:
        return self.choice.label if self.choice else "dense"

    @property
    def budget(self) -> int:
        """Attended tokens, whole units; of the baseline the whole context.

        100 % is everything, questions and answers too.
        """
        context = self.task.length
        if self.choice is None:
            return context
        whole = context + self.task.steps if self.share == 1 else context
        return self.choice.budget(self.share, whole)


def cells_of(
    tasks: Sequence[Task],
    choices: Sequence[Choice],
    shares: Sequence[float],
    dense: Sequence[tuple[int, ...]],
    layers: int,
) -> list[Cell]:
    """Make the dense baseline of each task, then its cells."""
    cells = []
    for task in tasks:
        cells.append(Cell(task, None, 1.0, tuple(range(layers))))
        cells += [
            Cell(task, choice, share, skipped)
            for skipped in dense
            for choice in choices
            for share in shares
        ]
    return cells


def room_for(task: Task, batch: int, page: int) -> dict[str, int]:
    """Return sizes of a ``SparseConfig`` for the contexts held at a time and for their forks.

    Args:
        task: contexts and questions.
        batch: questions that are decoded together.
        page: tokens of a page.
    """
    groups = [{question.context for question in group} for group in groups_of(task, batch)]
    together = min(batch, len(task.questions))
    sizes = {index: len(context) for index, context in enumerate(task.contexts)}
    pages = max(sum(-(-sizes[index] // page) for index in group) for group in groups)
    # A fork shares the full pages of its context; the open page and those behind are its own.
    own = max(-(-(size + task.steps) // page) - size // page for size in sizes.values())
    reach = -(-(task.length + task.steps) // page) * page
    return {
        "max_requests": max(map(len, groups)) + together,
        "max_tokens": max((pages + together * own) * page, reach),
        "max_request_tokens": reach,
        "page_tokens": page,
    }


def config_of(cell: Cell, grid: Grid) -> SparseConfig:
    """Return the settings of a cell, with room for its task."""
    choice = cell.choice
    room = room_for(cell.task, grid.batch, max(PAGE, choice.unit) if choice else PAGE)
    options: dict[str, Any] = {}
    if choice:
        options = {"algorithm": choice.name, "params": dict(choice.params), **choice.settings}
        options |= {"unit": choice.unit, "budget": cell.budget}
        options["buffer"] = choice.buffer(cell.budget, room["max_request_tokens"])
    return SparseConfig(
        backend=grid.backend,
        impl=grid.impl,
        dense_layers=cell.dense_layers,
        **room,
        **options,
    )


def run_cells(
    cells: Sequence[Cell],
    grid: Grid,
    begin: Callable[[Cell], None],
    advance: Advance = lambda questions: None,
) -> Iterator[Row]:
    """Run the cells one after the other; one that is refused gets a row with the reason.

    A context is read once for all cells of its task, and the logits of dense attention are made
    where a cell is the first of its task to need them.
    """
    forced, of, prefills = Forced(()), None, Prefills()
    for cell in cells:
        begin(cell)
        began = perf_counter()
        row = described(cell, grid)
        if of is not cell.task:
            forced, of = Forced.of(cell.task, grid.forced), cell.task
        try:
            if cell.choice and not forced.known:
                _logits_of_dense(cell, grid, forced, prefills)
            row |= _run(cell, grid, forced, prefills, advance)
        except (TopkvError, torch.OutOfMemoryError) as error:
            row["refused"] = _reason(error)
        gc.collect()  # buffers of the next cell may need the place
        row["seconds"] = round(perf_counter() - began, 3)
        yield row


def _logits_of_dense(cell: Cell, grid: Grid, forced: Forced, prefills: Prefills) -> None:
    """Make dense attention's logits of the forced questions, in a task of their own."""
    alone = replace(cell.task, questions=tuple(replace(q, new_tokens=0) for q in forced.questions))
    baseline = Cell(alone, None, 1.0, tuple(range(shape_of(grid.model).num_layers)))
    known = Forced(alone.questions)
    _run(baseline, grid, known, prefills, lambda questions: None)
    for question, short in zip(forced.questions, alone.questions, strict=True):
        forced.dense[question] = known.dense[short]


def _reason(error: Exception) -> str:
    reasons = getattr(error, "reasons", ())
    return "; ".join(reasons) if reasons else str(error).splitlines()[0]


def described(cell: Cell, grid: Grid) -> Row:
    """Return the fields of a row that are known before the run; each row has another ``key``."""
    choice, context = cell.choice, cell.task.length
    row = {
        "algorithm": cell.label,
        "plugin": choice.name if choice else None,
        "params": {**choice.settings, **choice.params} if choice else {},
        "unit": choice.unit if choice else None,
        "model": grid.name,
        "task": cell.task.name,
        "data": cell.task.digest,
        **cell.task.about,
        "question": "sparse" if all(q.tokens for q in cell.task.questions) else "dense",
        "context": context,
        "budget_tokens": cell.budget,
        "nominal_percent": round(100 * cell.share, 4),
        "dense_layers": list(cell.dense_layers),
        "sparse_layers": shape_of(grid.model).num_layers - len(cell.dense_layers),
    }
    config = grid.model.config.to_json_string()
    what = [row, config, grid.backend, grid.impl, grid.forced]
    return row | {"key": hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}


def _run(cell: Cell, grid: Grid, forced: Forced, prefills: Prefills, advance: Advance) -> Row:
    config = config_of(cell, grid)
    with torch.inference_mode(), attach(grid.model, config, engine="transformers") as handle:
        batch = min(grid.batch, len(cell.task.questions))
        run = Run(handle, cell.task, cell.budget, batch, forced, prefills)
        run.all(advance)
        return run.row()
