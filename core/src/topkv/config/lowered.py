"""What plugins and the coordinator receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch
from attrs import Factory, evolve, field, frozen

from topkv.config.layers import show_ranges
from topkv.config.settings import Settings
from topkv.config.sources import Setting
from topkv.types import GroupShape, ModelShape


@frozen
class LoweredGroup:
    """One group of layers.

    Attributes:
        shape: its geometry. ``shape.select`` leaves room for the forced tail in the budget.
        algorithm: None for dense layers.
        params: every parameter of the algorithm.
        budget: attended tokens of a lane; 0 for dense layers.
        seen: the geometry that the algorithm is told of: ``shape``, or the same in units of one
            token where selections are regranulated.
        indexed: the algorithm goes by the model's own indexer.
    """

    shape: GroupShape
    algorithm: str | None
    params: Mapping[str, Any]
    budget: int
    seen: GroupShape = field(default=Factory(lambda group: group.shape, takes_self=True))
    indexed: bool = False

    @property
    def regranulated(self) -> bool:
        """Whether the algorithm selects tokens, and their units are stored, moved and attended."""
        return self.seen.unit != self.shape.unit


def in_tokens(shape: GroupShape, select: int) -> GroupShape:
    """The same lanes in units of one token, of which ``select`` are selected."""
    return evolve(
        shape,
        unit=1,
        max_units=shape.max_units * shape.unit,
        select=select,
        buffer_slots=shape.buffer_slots * shape.unit,
        ring_slots=shape.ring_slots * shape.unit,
    )


@frozen(kw_only=True)
class LoweredConfig(Settings[Never, int | None]):
    """A configuration for one model on one device, complete and checked: the settings that hold
    for all layers, and what follows from them.

    Attributes:
        device: where the model decodes.
        model: geometry of the attention layers.
        groups: by first layer; every layer of the model is in one of them.
        num_pages: pages of the host pool: those of ``max_tokens``, a partly filled one
            for each request, and page 0, which is never leased.
        capturable: every plugin of every group states that its decode methods can be captured in
            a CUDA graph, so that an engine may capture a step.
        settings: every value with its origin.
    """

    device: torch.device
    model: ModelShape
    num_pages: int
    groups: tuple[LoweredGroup, ...] = ()
    capturable: bool = True
    settings: tuple[Setting, ...] = ()

    def selecting_layers(self, group: LoweredGroup) -> tuple[int, ...]:
        """Layers of a group that select for themselves; the others share what was selected in the
        layer before them."""
        indexer = self.model.indexer
        if group.algorithm is None or not group.indexed or indexer is None:
            return group.shape.layers
        return tuple(layer for layer in group.shape.layers if indexer.selects_for(layer))

    def describe(self) -> str:
        """The settings and the groups as two plain tables."""
        rows = [(setting.name, str(setting.value), setting.origin) for setting in self.settings]
        groups = [
            (
                show_ranges(group.shape.layers),
                group.shape.residency,
                group.algorithm or "dense",
                f"{group.shape.unit} of tokens" if group.regranulated else str(group.shape.unit),
                str(group.shape.lane_heads),
                str(group.shape.select),
                str(group.shape.buffer_slots),
                str(group.shape.ring_slots),
            )
            for group in self.groups
        ]
        head = ("layers", "residency", "algorithm", "unit", "lanes", "select", "buffer", "ring")
        return f"{_table(('setting', 'value', 'origin'), rows)}\n\n{_table(head, groups)}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
