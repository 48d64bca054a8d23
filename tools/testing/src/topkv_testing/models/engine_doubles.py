"""Plugins of the engine suite: a selection that roams, and an observer that remembers.

The algorithm ``roving`` selects by length alone, so that an oracle knows every selection without a
look at the engine, and still makes the buffer of every long request load and evict at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv.plugins.discovery import hookimpl
from topkv.types import LayerView, Selection

HEAD_STEP, LAYER_STEP = 5, 3


def roving_units(layer: int, head: int, length: int, unit: int, width: int) -> list[int]:
    """Units that ``Roving`` selects, in plain Python."""
    closed = (length - 1) // unit
    start = length * width + HEAD_STEP * head + LAYER_STEP * layer
    return [(start + place) % closed for place in range(min(width, closed))]


@define
class Fault:
    """An exception that waits in the middle of a forward.

    Attributes:
        error: what is raised.
        decode: True to raise in a decode step, else while a prompt is appended.
        layer: model layer.
        calls: number of the call that raises, from 1.
    """

    error: BaseException
    decode: bool
    layer: int
    calls: int

    def count(self) -> bool:
        self.calls -= 1
        return self.calls == 0


class Roving:
    """Selects a run of units that jumps by its own width from step to step, and wraps around.

    The run depends on length, layer and kv-head alone. It holds every closed unit when the
    selection is wide enough.

    Attributes:
        fault: raised once by a hook, None for none.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.group = setup.group
        self.fault: Fault | None = None

    def _fail(self, layer: int, decode: bool) -> None:
        fault = self.fault
        if fault and (fault.layer, fault.decode) == (layer, decode) and fault.count():
            self.fault = None
            raise fault.error

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec()

    @hookimpl
    def construct(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        k: Tensor,
        v: Tensor,
        q: Tensor,
        lse: Tensor,
    ) -> None:
        self._fail(layer.layer, decode=False)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Do nothing."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        if self.fault and layer.step.appended.any():  # the warm start is no step of a model
            self._fail(layer.layer, decode=True)
        width, heads = out.ids.shape[1], self.group.lane_heads
        length = layer.step.lengths.repeat_interleave(heads)[:, None]
        closed = (length - 1).clamp(min=0) // self.group.unit
        lane = torch.arange(out.ids.shape[0], device=out.ids.device)[:, None]
        place = torch.arange(width, device=out.ids.device)
        start = length * width + HEAD_STEP * (lane % heads) + LAYER_STEP * layer.layer
        units = (start + place) % closed.clamp(min=1)
        out.ids.copy_(torch.where(place < closed, units, -1))
        return out


@frozen
class Forward:
    """A forward as an observer saw it end.

    Attributes:
        slots: decode rows, -1 for padded ones.
        prefill_tokens: prompt tokens.
        lengths: tokens of each decode row, by slot.
        misses: units that were loaded for each decode row so far, by slot.
    """

    slots: tuple[int, ...]
    prefill_tokens: int
    lengths: dict[int, int]
    misses: dict[int, int]


class Watcher:
    """An observer that keeps the reports of all forwards.

    Args:
        setup: not used.

    Attributes:
        coordinator: asked for lengths and misses; set by the suite, None to ask none.
        began: ``(slots, prefill_tokens)`` of the forwards that began.
        ended: the forwards that ended.
    """

    def __init__(self, setup: ObserverSetup) -> None:
        self.coordinator: Any = None
        self.began: list[tuple[tuple[int, ...], int]] = []
        self.ended: list[Forward] = []

    @hookimpl
    def before_forward(self, report: ForwardReport) -> None:
        self.began.append((report.slots, report.prompt_tokens))

    @hookimpl
    def after_forward(self, report: ForwardReport) -> None:
        rows, prefill_tokens = report.slots, report.prompt_tokens
        ask = self.coordinator
        live = [slot for slot in rows if slot >= 0] if ask else []
        lengths = {slot: ask.length(slot) for slot in live}
        misses = {slot: ask.transfers_of([slot]).misses for slot in live}
        self.ended.append(Forward(rows, prefill_tokens, lengths, misses))

    def forget(self) -> None:
        self.began, self.ended = [], []


ROVING = PluginEntry(
    "roving",
    "algorithm",
    f"{__name__}:Roving",
    capabilities=Capabilities(scopes=("kv_head", "shared"), attention=("gqa", "mla")),
    defaults={"scope": "kv_head"},
)

WATCHER = PluginEntry("watcher", "observer", f"{__name__}:Watcher")
