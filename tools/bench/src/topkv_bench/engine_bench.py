"""The grid through an engine that serves, stock or with topkv: each cell in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from topkv.errors import ConfigError
from topkv_bench import geometry
from topkv_bench.contestants import Cell
from topkv_bench.options import Options
from topkv_bench.rows import REFUSED, Row

SERVED = ("dense", "topkv-resident", "topkv")
"""Contestants through an engine: the stock one, and topkv."""

TAIL = 4000
"""Characters of a failed process's log that are shown."""


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write a configuration that names its class, by which an engine chooses the model."""
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


class EngineBench(ABC):
    """Runs the cells of a grid through an engine, with weights that it makes up.

    Args:
        options: options of the command.

    Attributes:
        weights_bytes: bytes of the parameters of the model.

    Raises:
        ConfigError: no model can be made, or the engine cannot do what was asked for; no cell was
            run.
    """

    title: str
    """The engine, as errors name it."""

    cell: str
    """The module that runs a cell, with what was asked for and a file for the row."""

    def __init__(self, options: Options) -> None:
        reasons = self.refused_options(options)
        if options.profiled > 0:
            reasons.append("--profile: phases are those of the engine transformers")
        if reasons:
            raise ConfigError(f"{self.title} cannot be measured like this", reasons)
        self.options = options
        self.cells = [self._waiting(each) for each in options.cells()]
        longest = max(cell.tokens for cell in self.cells)
        self.config = geometry.config_of(options.model, options.config_path, longest)
        self.model = geometry.build(self.config, torch.device("meta"), options.dtype)
        self.weights_bytes = sum(each.nbytes for each in self.model.parameters())

    @abstractmethod
    def refused_options(self, options: Options) -> list[str]:
        """Return reasons, if any, why the engine cannot run with these options."""

    @abstractmethod
    def version(self) -> str:
        """Return the version of the engine."""

    def facts(self) -> dict[str, Any]:
        """Facts about the model and the engine that results depend on."""
        return {
            "class": type(self.model).__name__,
            "parameters": self.model.num_parameters(),
            "weights_bytes": self.weights_bytes,
            "attention": None,
            "cannot_attach": [],
            self.options.engine: self.version(),
        }

    def run(self) -> Iterator[Row]:
        """Yield a row for each cell, as soon as it is done."""
        with TemporaryDirectory() as folder:
            model = Path(folder)
            save_config(self.config, model)
            for cell in self.cells:
                for accept in cell.accepts:
                    yield self._row(cell, accept, model)

    def _waiting(self, cell: Cell) -> Cell:
        """Return a cell with room for the tokens that requests generate while prompts of others
        are read, with each chunk those of a step; any of its drafts may be accepted."""
        options, chunks = self.options, -(-cell.context // self.options.chunk)
        steps = options.warmup + options.steps + cell.requests * (chunks + 1)
        return attrs.evolve(cell, new_tokens=1 + steps * cell.verified)

    def _row(self, cell: Cell, accept: float, model: Path) -> Row:
        row: Row = cell.row
        if cell.queries is not None:
            row["accept"] = accept if cell.queries > 1 else None
        if cell.contestant not in SERVED:
            reason = f"through {self.title} there are {', '.join(SERVED)} and no {cell.contestant}"
            return row | {"status": REFUSED, "reason": reason}
        found = self._measured(cell, accept, model)
        if found.get("peak_bytes") is not None:
            found["peak_bytes"] -= self.weights_bytes
        return row | found

    def _measured(self, cell: Cell, accept: float, model: Path) -> Row:
        options, settings = self.options, cell.sparse_config.as_dict()
        settings.pop("max_queries", None)  # the engine has a name of its own for it
        if options.kv_limit is not None:  # what a limit has free is for requests
            settings.setdefault("prefill_buffer_tokens", 0)
        asked = {
            "contestant": cell.contestant,
            "context": cell.context,
            "requests": cell.requests,
            "tokens": cell.tokens,
            "drift": cell.drift,
            "queries": cell.queries,
            "accept": accept,
            "fill": options.fill,
            "settings": settings,
            "model": str(model),
            "dtype": str(options.dtype).removeprefix("torch."),
            "device": options.device.type,
            "chunk": options.chunk,
            "warmup": options.warmup,
            "steps": options.steps,
            "kv_limit": options.kv_limit,
            "engine_args": dict(options.engine_args),
        }
        answer = model / "row.json"
        answer.unlink(missing_ok=True)
        log = model / "log"
        command = [sys.executable, "-m", self.cell, json.dumps(asked), str(answer)]
        with log.open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
        if done.returncode or not answer.exists():
            reported = log.read_text(errors="replace")[-TAIL:]
            raise RuntimeError(f"{self.title} ended with status {done.returncode}:\n{reported}")
        row: Row = json.loads(answer.read_text())
        return row
