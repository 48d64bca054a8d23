"""StreamingLLM: the first tokens and the newest ones, whatever they say.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453. Differences from its code: keys keep the positions at which they were made
(see the README); whole units are kept; a prompt is attended densely, and only decoding slides.
"""

from __future__ import annotations

from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec
from topkv.types import LayerView, Selection
from topkv_streaming_llm import reference


class StreamingLLM:
    """Selects the units of the first ``sink_tokens`` tokens and the newest closed units.

    It keeps no representation and no state, and neither queries nor keys matter. With K units in
    a selection and s units of sinks, ``K - s`` closed units and the open one are the window; of a
    row that appends several tokens the closed units are those before the first of them.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.group, sinks = setup.group, setup.params.sink_tokens
        self.sinks = -(-sinks // self.group.unit)
        if self.sinks > self.group.select:
            reason = (
                f"sink_tokens = {sinks} takes {self.sinks} units of {self.group.unit} tokens, and "
                f"a selection has {self.group.select}; lower it or raise the budget"
            )
            raise ConfigError("streaming_llm", [reason])

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
        first = (step.lengths - step.appended.clamp(min=1)).clamp(min=0)
        closed = first // group.unit * (step.slots >= 0)
        units = reference.kept_units(closed, out.ids.shape[1], self.sinks)
        out.ids.copy_(units.repeat_interleave(group.lane_heads, 0))
        return out
