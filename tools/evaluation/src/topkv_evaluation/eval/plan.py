"""Cells of ``topkv eval`` from its options, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from topkv.config import SparseConfig
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv_cli.named import require_plugins
from topkv_evaluation.eval import ALGORITHMS, INDEXED, LEAST_STEPS
from topkv_evaluation.eval.catalogue import BYTES, FACTS, RULER, Catalogue, has_length, read_words
from topkv_evaluation.eval.cells import Cell, Grid, Row, cells_of, described, run_cells
from topkv_evaluation.eval.choices import (
    installed,
    read_algorithms,
    read_budgets,
    read_dense_layers,
)
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.runs import Advance
from topkv_evaluation.eval.tasks import Task
from topkv_evaluation.loading import load_served
from topkv_evaluation.tasks.own import SWEPT
from topkv_transformers.support import shape_of

BATCH = {"cuda": 256}
CPU_BATCH = 32


@dataclass(frozen=True)
class Plan:
    """The cells of a run, in order."""

    options: Options
    grid: Grid
    cells: Sequence[Cell]

    @classmethod
    def of(cls, options: Options) -> Plan:
        """Load the model and make the cells.

        Raises:
            ConfigError: an option is wrong, or the model lacks positions for a context.
            CapabilityError: the model cannot be attached.
        """
        shares = read_budgets(options.budgets)
        _check_words(options)
        trust = options.trust_remote_code
        model = load_served(
            options.folder, options.device, dtype=options.dtype, trust_remote_code=trust
        )
        shape = shape_of(model)
        layers = shape.num_layers
        dense = [read_dense_layers(text, layers) for text in dict.fromkeys(options.dense_layers)]
        words = ALGORITHMS if shape.indexer is None else INDEXED[shape.attention]
        usual = installed(words, registry())

        def chosen(steps: int) -> Sequence[str]:
            named = options.algorithms or (usual,)
            return [text.replace("{steps}", str(steps)) for text in named]

        # Default algorithms; tasks may take long to make.
        read_algorithms(chosen(LEAST_STEPS), shape.head_dim, registry())
        tasks = _tasks(options, model)
        _check_positions(model, tasks)
        steps = max(LEAST_STEPS, *(task.steps for task in tasks))
        choices = read_algorithms(chosen(steps), shape.head_dim, registry())
        options = replace(options, algorithms=chosen(steps))
        batch = options.batch or BATCH.get(model.device.type, CPU_BATCH)
        name = options.folder.resolve().name
        grid = Grid(model, options.backend, options.impl, batch, options.forced, name)
        return cls(options, grid, cells_of(tasks, choices, shares, dense, layers))

    def keyed(self) -> dict[str, Cell]:
        """Return the cells by the key of their rows."""
        return {described(cell, self.grid)["key"]: cell for cell in self.cells}

    def announced(self, done: Container[str]) -> str:
        """Return the plan in a line."""
        left = [cell for key, cell in self.keyed().items() if key not in done]
        tasks = [*{id(cell.task): cell.task for cell in left}.values()]
        contexts = sum(len(task.contexts) for task in tasks)
        longest = max((task.length for task in tasks), default=0)
        questions = sum(len(cell.task.questions) for cell in left)
        return (
            f"cells: {len(left)}, of tasks: {len(tasks)}; questions in all: {questions}; contexts "
            f"to read: {contexts}, of up to {longest} tokens, once for all cells that can share "
            "them"
        )

    def run(
        self, done: Container[str], begin: Callable[[Cell], None], advance: Advance
    ) -> Iterator[Row]:
        """Run the cells whose keys are not done; see ``cells.run_cells``."""
        left = [cell for key, cell in self.keyed().items() if key not in done]
        return run_cells(left, self.grid, begin, advance)

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse a comparison of which nothing could run.

        Raises:
            ConfigError: with the reasons of all its cells.
        """
        refused = [row["refused"] for row in rows if row["plugin"] and "refused" in row]
        if len(refused) == sum(row["plugin"] is not None for row in rows):
            raise ConfigError("no cell of the comparison could run", dict.fromkeys(refused))

    def settings(self) -> dict[str, Any]:
        """Return the options, for people who want to repeat the run."""
        values = {name: value for name, value in asdict(self.options).items() if value is not None}
        values |= {name: str(values[name]) for name in ("model",) if name in values}
        return values | {"batch": self.grid.batch}


def _check_words(options: Options) -> None:
    """Refuse options that are wrong for any model, before one is loaded."""
    require_plugins(SparseConfig(backend=options.backend), registry())
    if options.algorithms:
        named = [text.replace("{steps}", str(LEAST_STEPS)) for text in options.algorithms]
        read_algorithms(named, 1, registry())
    if options.tasks:
        read_words(options.tasks)


def _tasks(options: Options, model: PreTrainedModel) -> list[Task]:
    usual = FACTS if model.config.vocab_size == BYTES else RULER
    words = read_words(options.tasks or (usual,))
    if options.contexts and not any(map(has_length, words)):
        raise ConfigError(
            "--contexts and --tasks exclude each other", ["a task file brings its contexts"]
        )
    unswept = [word for word in words if word not in SWEPT] if options.depths else []
    if unswept:
        raise ConfigError(
            "--depths is refused",
            [
                f"{word!r} asks for no single needle; expected {', '.join(SWEPT)}"
                for word in unswept
            ],
        )
    tasks = Catalogue(model, options).tasks(words)
    if options.question == "dense":
        tasks = [task.with_questions_read() for task in tasks]
    return tasks


def _check_positions(model: PreTrainedModel, tasks: Sequence[Task]) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    reasons = [
        f"{task.name}: context, question and answer reach {task.length + task.steps} tokens"
        for task in tasks
        if positions is not None and task.length + task.steps > positions
    ]
    if reasons:
        raise ConfigError(f"the model has {positions} positions", reasons)
