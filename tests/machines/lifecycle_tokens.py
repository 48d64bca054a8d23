"""Lives of requests of which tokens are selected, whatever units are stored and attended."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.machines.lifecycle import Lives


class TokenLives(Lives):
    """Units that a selection of tokens stands for, from Python's sets."""

    def _width(self, layer: int) -> int:
        """Tokens of a selection."""
        selector = self.coordinator.layers[layer].selector
        assert selector is not None
        return selector.view.group.select

    def _units(self, layer: int, ids: list[int]) -> list[int]:
        unit = self.groups[layer].unit
        return ids if unit == 1 else sorted({token // unit for token in ids if token >= 0})

    def _token_hosts(self, layer: int, hosts: Tensor) -> Tensor:
        """Host ids of the tokens of units: each token has a representation."""
        unit = self.groups[layer].unit
        return (hosts[:, None] * unit + torch.arange(unit, device=hosts.device)).flatten()
