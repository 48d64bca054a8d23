"""Stock layers of a mixed model in recorded steps, while topkv serves the others.

A window of Transformers counts on the host how much it holds, and makes new tensors in each step;
linear states and convolutions are written in place. Neither is what a recording could read again
for any cache. But once a window is full a step adds one token and forgets one, sees all that is
there, and all tensors keep their shapes. So the tensors of stock layers are at fixed addresses
while a step runs, and are handed to its cache behind it; until windows are full Python issues the
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from topkv_transformers.state import CacheState
from topkv_transformers.stock import StockLayers, in_place


def are_steady(state: CacheState) -> bool:
    """Return True if a step changes no shape, and sees all of each window and no padding."""
    shortest = state.seen - int(state.padding.max(initial=0))
    return all(_is_steady(layer, shortest) for layer in state.stock)


def _is_steady(layer: Any, shortest: int) -> bool:
    if getattr(layer, "record_past", False):
        return False
    if isinstance(layer, DynamicSlidingWindowLayer):
        return bool(min(layer.cumulative_length, shortest) >= layer.sliding_window)
    begun = getattr(layer, "has_previous_state", {}).values()
    # One that a prompt gave nothing to is there for nothing, and will get nothing.
    return all(begun) or (shortest > 0 and not any(begun))


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A layer's attribute, with other tensors in the places of its own."""
    if isinstance(value, dict):
        return {name: _with(each, tensors) for name, each in value.items()}
    return next(tensors) if isinstance(value, Tensor) and value.ndim else value


class FixedStock:
    """Tensors of stock layers for one number of rows, where recordings find them.

    Args:
        stand_in: layers of the cache that a recorded step appends to.

    Attributes:
        fixed: all tensors, in the order of ``StockLayers.tensors``.
    """

    def __init__(self, stand_in: StockLayers) -> None:
        self.stand_in = stand_in
        self.fixed: list[Tensor] = []
        self._given: list[Tensor] = []

    def take(self, state: CacheState) -> None:
        """Hold the tensors of a cache; nothing is copied if the last step gave it these."""
        held = state.stock.tensors
        if not self.fixed:
            self.fixed = [each.clone() for each in held]
            return
        # What is written in place is the same tensor behind a step that Python issued, too.
        moved = any(map(in_place, state.stock))
        moved |= any(each is not given for each, given in zip(held, self._given, strict=True))
        if moved and held:
            torch._foreach_copy_(self.fixed, held)

    def begin(self, state: CacheState) -> None:
        """Let the stand-in's layers be those of a cache, but for where they hold it."""
        tensors = iter(self.fixed)
        for mine, layer in zip(self.stand_in, state.stock, strict=True):
            mine.__dict__ = _with(vars(layer), tensors)

    def end(self) -> None:
        """Hold what the stand-in's layers hold behind the step; a part of what is recorded."""
        pairs = zip(self.fixed, self.stand_in.tensors, strict=True)
        moved = [(fixed, held) for fixed, held in pairs if held is not fixed]
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))

    def give(self, state: CacheState) -> None:
        """Give a cache what it holds behind the step, in tensors of its own.

        What it held before is left as it was, for somebody may go back to it.
        """
        self._given = [torch.empty_like(each) for each in self.fixed]
        if self.fixed:
            torch._foreach_copy_(self._given, self.fixed)
        tensors = iter(self._given)
        for layer in state.stock:
            layer.__dict__ = _with(vars(layer), tensors)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length += 1
