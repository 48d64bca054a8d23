"""The grid of a comparison: a cell for each task, algorithm, budget and set of dense layers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv.errors import TopkvError
from topkv_evaluation.eval.choices import Choice
from topkv_evaluation.eval.runs import Row, Run
from topkv_evaluation.eval.tasks import Task
from topkv_transformers.support import shape_of

PAGE = 64


@dataclass(frozen=True)
class Grid:
    """Everything that the cells have in common.

    Attributes:
        model: not attached.
        backend, impl: as in ``SparseConfig``.
        batch: questions that are decoded together.
    """

    model: PreTrainedModel
    backend: str | None
    impl: str | None
    batch: int


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
        """Attended tokens, whole units; of the baseline the whole context."""
        context = self.task.length
        return self.choice.budget(self.share, context) if self.choice else context


def cells_of(
    tasks: Sequence[Task],
    choices: Sequence[Choice],
    shares: Sequence[float],
    dense: Sequence[tuple[int, ...]],
    layers: int,
) -> list[Cell]:
    """The dense baseline of each task, then its cells."""
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


def config_of(cell: Cell, grid: Grid) -> SparseConfig:
    """Settings with room for the contexts once, and for what the forks append to them."""
    task, choice = cell.task, cell.choice
    page = max(PAGE, choice.unit) if choice else PAGE
    batch = min(grid.batch, len(task.questions))
    pages = sum(-(-len(context) // page) for context in task.contexts)
    # A fork shares the full pages of its context; the open page and those behind are its own.
    own = max(-(-(len(c) + task.steps) // page) - len(c) // page for c in task.contexts)
    reach = -(-(task.length + task.steps) // page) * page
    options: dict[str, Any] = {}
    if choice:
        budget = cell.budget
        sizes = {"unit": choice.unit, "budget": budget, "buffer": choice.buffer(budget, reach)}
        options = {"algorithm": choice.name, "params": dict(choice.params)}
        options |= {**choice.settings, **sizes}
    return SparseConfig(
        backend=grid.backend,
        impl=grid.impl,
        dense_layers=cell.dense_layers,
        max_requests=len(task.contexts) + batch,
        max_tokens=max((pages + batch * own) * page, reach),
        max_request_tokens=reach,
        page_tokens=page,
        **options,
    )


def run_cells(cells: Sequence[Cell], grid: Grid, begin: Callable[[Cell], None]) -> Iterator[Row]:
    """Run the cells one after the other; one that is refused gets a row with the reason."""
    for cell in cells:
        begin(cell)
        began = perf_counter()
        row = _described(cell, shape_of(grid.model).num_layers)
        try:
            row |= _run(cell, grid)
        except (TopkvError, torch.OutOfMemoryError) as error:
            row["refused"] = _reason(error)
        gc.collect()  # buffers of the next cell may need the place
        row["seconds"] = round(perf_counter() - began, 3)
        yield row


def _reason(error: Exception) -> str:
    reasons = getattr(error, "reasons", ())
    return "; ".join(reasons) if reasons else str(error).splitlines()[0]


def _described(cell: Cell, layers: int) -> Row:
    choice, context = cell.choice, cell.task.length
    return {
        "algorithm": cell.label,
        "plugin": choice.name if choice else None,
        "params": {**choice.settings, **choice.params} if choice else {},
        "unit": choice.unit if choice else None,
        "task": cell.task.name,
        "context": context,
        "budget_tokens": cell.budget,
        "nominal_percent": round(100 * cell.share, 4),
        "dense_layers": list(cell.dense_layers),
        "sparse_layers": layers - len(cell.dense_layers),
    }


def _run(cell: Cell, grid: Grid) -> Row:
    config = config_of(cell, grid)
    with torch.inference_mode(), attach(grid.model, config, engine="transformers") as handle:
        run = Run(handle, cell.task, cell.budget, min(grid.batch, len(cell.task.questions)))
        run.all()
        return run.row()
