"""Counts tokens that were attended beyond selections, in forwards and in replays of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.assembly.stages import Staged
from topkv.decode.layers import LayerPath
from topkv.decode.loads import Loads
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv.types import Plan, Selection
from topkv_regranulate.stage import Regranulate


class CountedLoads(Loads):
    """Loads of a layer, in whose turn the extra tokens of its selection are counted.

    Args:
        loads: loads of the layer.
        extra: int64 ``[max_lanes]`` of the layer that has selected, see ``Regranulate.extra``.
        counts: int64 ``[2, lane_heads]`` extra tokens of rows that append none, and of others.
    """

    def __init__(self, loads: Loads, extra: Tensor, counts: Tensor) -> None:
        super().__init__(loads.path, loads.number)
        self._loads, self._extra, self._counts = loads, extra, counts

    def plan(self, selection: Selection) -> Plan:
        return self._loads.plan(selection)

    def load(self, plan: Plan) -> None:
        appended, heads = self.path.view.step.appended, self._counts.shape[1]
        extra = self._extra[: len(appended) * heads].view(-1, heads)
        self._counts.index_add_(0, appended.clamp(max=1), extra)
        self._loads.load(plan)


class ExtraTokens:
    """The contract is ``topkv.hooks.observer``. A forward takes one more
    launch for each layer behind the stage, and is otherwise the same.

    Attributes:
        counts: int64 ``[2, lane_heads]`` of each such layer, see ``CountedLoads``.
    """

    def __init__(self, setup: ObserverSetup) -> None:
        self._groups, self._device = setup.config.groups, setup.config.device
        self.counts: dict[int, Tensor] = {}

    @hookimpl
    def bind_layers(self, layers: Sequence[LayerPath]) -> Callable[[], dict[int, int]]:
        for path in layers:
            stage = path.algorithm.links[-1].stage if isinstance(path.algorithm, Staged) else None
            if isinstance(stage, Regranulate):
                group, layer = path.view.group, path.view.layer
                turns = self._groups[path.lanes.index].turns
                (selecting,) = (turn[0] for turn in turns if layer in turn)
                extra = stage.extra[group.layers.index(selecting)]
                shape = (2, group.lane_heads)
                counts = torch.zeros(shape, dtype=torch.int64, device=self._device)
                self.counts[layer] = counts
                path.loads = CountedLoads(path.loads, extra, counts)
        return self.tokens

    @hookimpl
    def before_forward(self, report: ForwardReport) -> None:
        """Do nothing: layers are counted as they load."""

    @hookimpl
    def after_forward(self, report: ForwardReport) -> None:
        """Do nothing: the device may still be at work."""

    def tokens(self) -> dict[int, int]:
        """Tokens by layer that were attended beyond the selections, in closed units, by all lanes
        of all rows that appended a token, since the coordinator was made. Layers that share a
        selection count its tokens too. Synchronizes."""
        return {layer: int(counts[1].sum()) for layer, counts in self.counts.items()}
