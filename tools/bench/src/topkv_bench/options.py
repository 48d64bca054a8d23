"""Options of a run, and the grid of cells that they make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from topkv.config import SparseConfig
from topkv.errors import ConfigError
from topkv_bench.contestants import ROOM, Cell
from topkv_bench.verify import reached


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command.

    Attributes:
        model, config_path: a named geometry, or the path of a ``config.json``.
        contestants: some of ``NAMES``.
        contexts, requests: the grid.
        queries: tokens of each row that a step verifies, a part of the grid; None for one in the
            loop of ``generate``.
        accepts: shares of the drafts that are accepted.
        fill: ``"prompt"``, or ``"pool"`` for caches that are filled without one.
        drift: drift of topkv's selections, or a trace; None for the algorithm's own.
        steps, warmup: decode steps that are counted, and steps before them.
        profiled: decode steps behind them that are profiled.
        kv_limit: bytes on the device for keys, values and what topkv keeps beside them.
        chunk: tokens of a prompt that a forward takes.
        settings: settings of topkv.
        device, dtype: device and dtype of model and cache.
        engine: ``"transformers"``, ``"vllm"`` or ``"sglang"``.
        engine_args: further arguments of the engine.
    """

    model: str | None
    config_path: Path | None
    contestants: tuple[str, ...]
    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    fill: str
    drift: float | str | None
    steps: int
    warmup: int
    profiled: int
    kv_limit: int | None
    chunk: int
    settings: SparseConfig
    device: torch.device
    dtype: torch.dtype
    engine: str = "transformers"
    engine_args: Mapping[str, Any] = attrs.Factory(dict)
    queries: tuple[int, ...] | None = None
    accepts: tuple[float, ...] = (0.5,)

    def __attrs_post_init__(self) -> None:
        """Refuse a drift that steps of several tokens cannot have.

        Raises:
            ConfigError: the drift is more than a selection in a step.
        """
        most = max(self.queries or (1,))
        if isinstance(self.drift, float) and most > 1 and most * self.drift > 1:
            reason = (
                f"{most} tokens with {self.drift:g} of a selection new to each replace more than "
                f"the selection; give a share of at most {1 / most:g}"
            )
            raise ConfigError("--drift does not go with --queries", [reason])

    def cells(self) -> list[Cell]:
        """Return the grid: contexts, then requests, then contestants, then queries."""
        return [
            self._cell(name, context, requests, queries)
            for context in self.contexts
            for requests in self.requests
            for name in self.contestants
            for queries in self.queries or (None,)
        ]

    def _cell(self, contestant: str, context: int, requests: int, queries: int | None) -> Cell:
        steps = self.warmup + self.steps + self.profiled
        # Of one token nothing is drafted.
        accepts = self.accepts if (queries or 1) > 1 else (0.0,)
        return Cell(
            contestant=contestant,
            context=context,
            requests=requests,
            new_tokens=1 + steps if queries is None else reached(steps, accepts, queries),
            pool=self.fill == "pool",
            drift=self.drift,
            config=self.settings,
            queries=queries,
            accepts=accepts,
        )


def settings_of(config: SparseConfig, pairs: Mapping[str, Any]) -> SparseConfig:
    """Return the settings of a file, with single options over them.

    Raises:
        ConfigError: some are unknown or wrong, or follow from the grid.
    """
    settings = SparseConfig.load({**config.as_dict(), **pairs})
    reasons = [
        f"{name} follows from the contexts and requests of the grid; leave it out"
        for name in ROOM
        if name in settings.as_dict()
    ]
    if reasons:
        raise ConfigError("the configuration is refused", reasons)
    return settings
