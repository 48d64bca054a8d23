"""Lives of requests of which tokens are selected, whatever units are stored and attended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topkv_testing.machines.lifecycle import Lives
from topkv_testing.machines.lifecycle_model import SPARSE, Forward, Given


class TokenLives(Lives):
    """Units that a selection stands for, and tokens that they add, from Python's sets.

    Attributes:
        extra: tokens that each live request has attended beyond its selections.
    """

    extra: dict[int, int]

    def set_up(self, seed: int, fast: bool, **options: Any) -> None:
        self.extra = {}
        super().set_up(seed, fast, **options)

    def begin_request(self) -> int:
        slot = super().begin_request()
        self.extra[slot] = 0
        return slot

    def fork_request(self, slot: int) -> int | None:
        twin = super().fork_request(slot)
        if twin is not None:
            self.extra[twin] = 0
        return twin

    def check_counts(self) -> None:
        super().check_counts()
        for slot in self.live:
            counted = self.coordinator.transfers_of([slot]).extra
            assert counted == self.extra[slot], f"extra tokens of slot {slot}"

    def _compare(
        self, todo: Forward, outs: list[Tensor], given: Given, ids: dict[int, Tensor]
    ) -> None:
        super()._compare(todo, outs, given, ids)
        for layer in SPARSE:
            for row, slot in enumerate(todo.rows if layer < len(outs) else ()):
                if slot >= 0:
                    length = self.live[slot].length + (row in todo.appending)
                    for chosen in ids[layer][row].tolist():
                        self.extra[slot] += self._extra(layer, chosen, length)

    def _extra(self, layer: int, tokens: list[int], length: int) -> int:
        """Tokens that a lane attends in closed units without having selected them."""
        unit = self.groups[layer].unit
        end = max(0, length - 1) // unit * unit
        chosen = {token for token in tokens if 0 <= token < end}
        attended = {unit * (token // unit) + i for token in chosen for i in range(unit)}
        return len(attended - chosen)

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
