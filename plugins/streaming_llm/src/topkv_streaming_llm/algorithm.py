"""StreamingLLM: the first tokens and the newest ones, whatever they say.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453. Differences from its code: keys keep the positions at which they were made
(see the README); whole units are kept; a prompt is attended densely, and only decoding slides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec
from topkv.types import GroupShape, LayerView, Selection
from topkv_streaming_llm import reference


class StreamingLLM:
    """Selects the units of the first ``sink_tokens`` tokens and the newest closed units.

    It keeps no representation and no state, and neither queries nor keys matter. With K units in
    a selection and s units of sinks, ``K - s`` closed units and the open one are the window.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        _validate(setup.group, setup.params)
        self.group = setup.group
        self.sinks = -(-setup.params["sink_tokens"] // self.group.unit)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec(heads="none")

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        """Nothing: a slice needs no index."""

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Nothing: the window follows from the length."""

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step, group = layer.step, self.group
        closed = (step.lengths - 1).clamp(min=0) // group.unit * (step.slots >= 0)
        units = reference.kept_units(closed, out.ids.shape[1], self.sinks)
        out.ids.copy_(units.repeat_interleave(group.lane_heads, 0))
        return out


def _validate(group: GroupShape, params: Mapping[str, Any]) -> None:
    reasons = []
    unknown = sorted(set(params) - {"sink_tokens"})
    if unknown:
        reasons.append(f"unknown parameters {unknown}; streaming_llm takes 'sink_tokens'")
    sinks = params.get("sink_tokens")
    if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
        reasons.append(f"sink_tokens must be an integer of 0 or more, got {sinks!r}")
    elif -(-sinks // group.unit) > group.select:
        reasons.append(
            f"sink_tokens = {sinks} takes {-(-sinks // group.unit)} units of {group.unit} tokens, "
            f"and a selection has {group.select}; lower it or raise the budget"
        )
    if reasons:
        raise ConfigError("streaming_llm", reasons)
