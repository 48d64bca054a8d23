"""Lowered configurations: complete, checked, and handed to the coordinator and to plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch
from attrs import field, frozen

from topkv.config.layers import show_ranges
from topkv.config.settings import Settings
from topkv.config.sources import Setting
from topkv.config.stages import StageSettings
from topkv.errors import ConfigError
from topkv.hooks.host_format import HostFormat
from topkv.hooks.kv_format import KVFormat
from topkv.kv.host_format import PLAIN
from topkv.types import GroupShape, ModelShape


@frozen
class LoweredGroup:
    """One group of layers.

    Attributes:
        shape: its geometry. ``shape.select`` leaves room for the forced tail in the budget.
        algorithm: None for dense layers.
        params: of the algorithm, an instance of ``PluginEntry.parameters``.
        budget: attended tokens of a lane; 0 for dense layers.
        selected_as: the geometry that the algorithm's setup and views have: ``shape`` itself, or
            the same lanes in units of one token where a stage regrains.
        indexed: the algorithm selects by the model's own indexer.
        tail: ``"forced"``, or ``"selectable"`` where the newest token competes in selections.
        scope: ``"kv_head"`` or ``"shared"``; with a single kv-head the shape is the same.
        stages: the stages behind the algorithm, in order, with their parameters.
        selecting: layers that select for themselves; the others share what was selected in the
            layer before them. None of a dense group.
        host: form of its entries in host memory.
        queries: most queries of a row that its plugins are given at once: all, or one where each
            query selects for itself.
        singly: True if rows have more than that.
    """

    shape: GroupShape
    algorithm: str | None
    params: Any
    budget: int
    selected_as: GroupShape
    indexed: bool
    tail: str
    scope: str
    stages: tuple[StageSettings, ...] = ()
    selecting: tuple[int, ...] = ()
    host: HostFormat = PLAIN
    queries: int = 1
    singly: bool = False

    @property
    def regrained(self) -> bool:
        """True if tokens are selected, and the larger units that hold them stored and attended."""
        return self.selected_as.unit != self.shape.unit

    @property
    def turns(self) -> list[list[int]]:
        """Each layer that selects for itself, before those that share what it selects."""
        turns: list[list[int]] = []
        for layer in self.shape.layers if self.selecting else ():
            if layer in self.selecting:
                turns.append([])
            turns[-1].append(layer)
        return turns

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of attention that its stages ask of the backend, with their parameters."""
        return {option: stage.params for stage in self.stages for option in stage.options}


@frozen(kw_only=True)
class LoweredConfig(Settings[Never, int | None]):
    """A configuration for one model on one device, complete and checked: the settings that hold
    for all layers, and what follows from them.

    Attributes:
        device: where the model decodes.
        model: geometry of the attention layers.
        format: stored form of keys and values.
        groups: by first layer; every layer of the model is in one of them.
        num_pages: pages of the host pool: those of ``max_tokens``, a partly filled one
            for each request, and page 0, which is never leased.
        capturable: every plugin of every group states that its decode methods can be captured in
            a CUDA graph, so that an engine may capture a step.
        host_file: descriptor of a file that holds the host pool; None for memory of this process
            alone. Processes that map one file must do the same to the same pages in the same
            steps, so the pages are an engine's. It is not needed once a coordinator is made.
        settings: every value with its origin.
    """

    device: torch.device
    model: ModelShape
    num_pages: int
    format: KVFormat = field(eq=False)
    groups: tuple[LoweredGroup, ...] = ()
    capturable: bool = True
    host_file: int | None = field(default=None)
    settings: tuple[Setting, ...] = ()

    @host_file.validator
    def _check_host_file(self, _: object, file: int | None) -> None:
        if file is not None and self.pages != "engine":
            raise ConfigError(
                "processes cannot share this host pool",
                [f"host_file wants pages 'engine', got {self.pages!r}: each would lease its own"],
            )

    def describe(self) -> str:
        """The settings and the groups as two plain tables."""
        settings = [(setting.name, setting.value, setting.origin) for setting in self.settings]
        groups = []
        for group in self.groups:
            shape = group.shape
            unit = f"{shape.unit} of tokens" if group.regrained else shape.unit
            names = (show_ranges(shape.layers), shape.residency, group.algorithm or "dense")
            sizes = (shape.lane_heads, shape.select, shape.buffer_slots, shape.ring_slots)
            groups.append((*names, unit, *sizes))
        head = ("layers", "residency", "algorithm", "unit", "lanes", "select", "buffer", "ring")
        return f"{_table(('setting', 'value', 'origin'), settings)}\n\n{_table(head, groups)}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    lines = [head, *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
