"""Control of the demo: an algorithm that selects the first and the newest tokens.

It is a plugin like any other, but not installed: ``registry_with_window`` adds it to what is.
"""

from __future__ import annotations

import torch
from torch import Tensor

import topkv
from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec
from topkv.plugins import PluginRegistry
from topkv.plugins.records import installed
from topkv.types import LayerView, Selection

NAME = "window"
SINK_UNITS = 1


class Window:
    """Selects the first unit and the newest closed ones; the core appends the tail."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.group = setup.group

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec()

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        """Do nothing: the selection depends on the length alone."""

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Do nothing."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        """Fill a row with closed units: newest first, the sinks in the last places."""
        width = out.ids.shape[1]
        closed = (layer.step.lengths - 1).clamp(min=0) // self.group.unit
        closed = closed.repeat_interleave(self.group.lane_heads)[:, None]
        place = torch.arange(width, dtype=torch.int32, device=out.ids.device)
        sinks = min(SINK_UNITS, width)
        units = torch.where(place < width - sinks, closed - 1 - place, width - 1 - place)
        # A short request has fewer closed units: the window must not name the sinks again.
        inside = torch.where(place < width - sinks, units >= sinks, units < closed)
        out.ids.copy_(torch.where(inside, units, -1))
        return out


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [PluginEntry(NAME, "algorithm", f"{__name__}:Window", hook_api=(3, 0))]


def registry_with_window() -> PluginRegistry:
    """Return a registry of everything that is installed, and of the algorithm ``window``."""
    from topkv_evaluation import window

    return PluginRegistry([*installed(), ("topkv-window", topkv.__version__, window)])
