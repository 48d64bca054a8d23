"""Control of the demo: an algorithm that selects the first and the newest tokens.

It is a plugin like any other, but not installed: ``registry_with_window`` adds it to what is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import topkv
from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, RepresentationSpec
from topkv.plugins import PluginRegistry
from topkv.plugins.records import installed
from topkv_authoring.selectors import ScoredUnits

NAME = "window"
SINK_UNITS = 1


class Window(ScoredUnits):
    """Selects the first unit and the newest closed ones; the core appends the tail."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.sink_units = SINK_UNITS

    def representations(self) -> Sequence[RepresentationSpec]:
        return ()

    def represent(self, keys: Tensor, valid: Tensor) -> Mapping[str, Tensor]:
        return {}

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Score units by their places alone."""
        places = torch.arange(self.group.max_units, dtype=torch.float32, device=q.device)
        return places.expand(*q.shape[:2], -1)


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [PluginEntry(NAME, "algorithm", f"{__name__}:Window", hook_api=(3, 0))]


def registry_with_window() -> PluginRegistry:
    """Return a registry of everything that is installed, and of the algorithm ``window``."""
    from topkv_evaluation import window

    return PluginRegistry([*installed(), ("topkv-window", topkv.__version__, window)])
