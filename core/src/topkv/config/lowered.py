"""What plugins and the coordinator receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from topkv.config.layers import show_ranges
from topkv.types import GroupShape, ModelShape


@frozen
class Setting:
    """One value and where it came from, for people to read."""

    name: str
    value: Any
    origin: str


@frozen
class LoweredGroup:
    """One group of layers.

    Attributes:
        shape: its geometry. ``shape.select`` leaves room for the forced tail in the budget.
        algorithm: None for dense layers.
        params: every parameter of the algorithm.
        budget: attended tokens of a lane; 0 for dense layers.
    """

    shape: GroupShape
    algorithm: str | None
    params: Mapping[str, Any]
    budget: int


@frozen
class LoweredConfig:
    """A configuration for one model on one device, complete and checked.

    Attributes:
        impl: ``"reference"`` or ``"triton"``.
        groups: by first layer; every layer of the model is in one of them.
        backend, transfer, eviction, topk: names of plugins that are installed.
        max_request_tokens: a whole number of pages.
        num_pages: pages of the host pool: those of ``max_tokens``, a partly filled one
            for each request, and page 0, which is never leased.
        host_memory, device_memory: limits in bytes; None for none.
        settings: every value with its origin.

    The other attributes are those of ``SparseConfig``.
    """

    impl: str
    device: torch.device
    model: ModelShape
    groups: tuple[LoweredGroup, ...]
    backend: str
    transfer: str
    eviction: str
    topk: str
    max_requests: int
    max_tokens: int
    max_request_tokens: int
    page_tokens: int
    num_pages: int
    kv_format: str
    host_layout: str
    host_memory: int | None
    device_memory: int | None
    resident_fast_path: bool
    poison: bool
    prefill_block_tokens: int
    settings: tuple[Setting, ...]

    def describe(self) -> str:
        """The settings and the groups as two plain tables."""
        rows = [(setting.name, str(setting.value), setting.origin) for setting in self.settings]
        groups = [
            (
                show_ranges(group.shape.layers),
                group.shape.residency,
                group.algorithm or "dense",
                str(group.shape.unit),
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
